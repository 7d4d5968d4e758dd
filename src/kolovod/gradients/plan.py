"""The bucket plan: which gradients travel together.

Neighbours in the order in which backward makes them share a bucket of about a mebibyte, so that a
bucket leaves early and 500 small tensors are two operations. The user's groups travel whole. The
plan follows from sizes, groups and order alone, so it is the same on every rank that has the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from kolovod.errors import FrontEndArgumentError

BUCKET_BYTES = 1 << 20
"""A bucket takes no further gradient that would make it larger; one that is larger is alone."""

ALONE_BYTES = 32 << 10
"""With shards: a tensor of so many bytes is a part of its own, and is not copied to be sent.
Smaller ones are sent as one part: an operation of each would take longer than the copy."""

LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES = 128 << 10, 4 << 20
LEAST_DEVICE_BUCKET_BYTES, MOST_DEVICE_BUCKET_BYTES = 1 << 20, 32 << 20
_LINK_US = 10_000.0
_LEAST_BUCKETS = 8
_DEVICE_BUCKETS = 16
"""Buckets on a GPU, on one host: each costs the thread that runs backward 0.3 ms (H200), for
events and copies, in which it could give the GPU the work of several layers."""
_CLEARLY = 1.8


def bucket_bytes(link_bytes_per_us: float, all_bytes: int, *, on_device: bool = False) -> int:
    """Return the bytes a link between hosts carries in 10 ms, a power of two, 128 KiB to 4 MiB.

    Nothing hides the last bucket, whose gradients backward makes last, so over a slow link it is to
    be small. Over a fast one a larger bucket takes fewer operations, but not above a mebibyte where
    ``all_bytes`` of gradients would be fewer than eight buckets. ``link_bytes_per_us``: 0 where
    ranks are on one host: a mebibyte. ``on_device``: gradients are on a GPU: 1 MiB to 32 MiB, and
    on one host about sixteen buckets.
    """
    if link_bytes_per_us > 0:
        carried = _carried(link_bytes_per_us, all_bytes, on_device)
    elif on_device:
        carried = min(max(all_bytes // _DEVICE_BUCKETS, BUCKET_BYTES), MOST_DEVICE_BUCKET_BYTES)
    else:
        carried = BUCKET_BYTES
    return 1 << round(math.log2(carried))


def is_to_be_cut_anew(
    now: int, link_bytes_per_us: float, all_bytes: int, *, on_device: bool = False
) -> bool:
    """Return whether the link clearly calls for buckets of another size than ``now``.

    Rates are estimated all the time; halfway between two sizes buckets are left as they are.
    """
    if link_bytes_per_us <= 0:
        return False
    ratio = _carried(link_bytes_per_us, all_bytes, on_device) / now
    return ratio >= _CLEARLY or ratio <= 1 / _CLEARLY


def range_of_bytes(*, on_device: bool) -> tuple[int, int]:
    """The least and the most that a bucket is made to take."""
    if on_device:
        return LEAST_DEVICE_BUCKET_BYTES, MOST_DEVICE_BUCKET_BYTES
    return LEAST_BUCKET_BYTES, MOST_BUCKET_BYTES


def _carried(link_bytes_per_us: float, all_bytes: int, on_device: bool) -> float:
    least, _ = range_of_bytes(on_device=on_device)
    return min(max(link_bytes_per_us * _LINK_US, least), _most(all_bytes, on_device))


def _most(all_bytes: int, on_device: bool) -> int:
    _, most = range_of_bytes(on_device=on_device)
    return min(most, max(BUCKET_BYTES, all_bytes // _LEAST_BUCKETS))


def cut(
    sizes: Mapping[int, int],
    groups: Mapping[int, int] | None = None,
    bucket_bytes: int | None = None,
) -> list[list[int]]:
    """The buckets, each a list of indices, in the order in which they get their first gradient.

    ``sizes``: bytes by index, in the order in which backward makes gradients. ``groups``: the
    number of the user's group by index, for those that are in one. ``bucket_bytes``: a bucket takes
    no further gradient that would make it larger; None: a mebibyte.
    """
    most = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    buckets: list[list[int]] = []
    by_group: dict[int, list[int]] = {}
    neighbours: list[int] | None = None
    filled = 0
    for index, size in sizes.items():
        group = None if groups is None else groups.get(index)
        if group is not None:
            if group not in by_group:
                by_group[group] = []
                buckets.append(by_group[group])
            by_group[group].append(index)
            continue
        if neighbours is None or filled + size > most:
            neighbours = []
            buckets.append(neighbours)
            filled = 0
        neighbours.append(index)
        filled += size
    return buckets


class Groups:
    """Gradients that the user wants to travel together: a number of groups, or lists of members."""

    def __init__(
        self,
        given: int | Sequence[Iterable[Any]] | None,
        members: str,
        key: Callable[[Any], Hashable | None] = id,
    ) -> None:
        """Raises InvalidArgumentError for what is neither, or has a member twice.

        ``given``: a number of groups of neighbours, lists, or None for none. ``members``: what
        they are, for errors ("parameters"). ``key``: what identifies a member; None: it is none.
        """
        self._count = 0
        self._numbers: dict[Hashable, int] = {}
        self._labels: dict[Hashable, str] = {}
        self._members = members
        self._key = key
        if given is None:
            return
        if isinstance(given, int) and not isinstance(given, bool):
            if given < 0:
                raise FrontEndArgumentError(
                    f"groups is {given}: give a number of groups, 0 for none"
                )
            self._count = given
            return
        if not isinstance(given, list | tuple) or not all(map(_is_group, given)):
            raise FrontEndArgumentError(
                f"groups is {given!r}: give a number, or lists of {members}"
            )
        for number, group in enumerate(given):
            for member in group:
                self._put(member, number)

    def __bool__(self) -> bool:
        """Return whether there are any groups."""
        return bool(self._count or self._numbers)

    @property
    def is_number(self) -> bool:
        """True where a number of groups was given: they are cut from whatever members there are."""
        return self._count > 0

    def among(self, members: Mapping[int, Any]) -> dict[int, int]:
        """The number of the group of each of ``members`` that is in one, both by index.

        A number of groups are cut from ``members`` in their order, as equal as can be.
        """
        if self._count:
            count = min(self._count, len(members))
            return {index: i * count // len(members) for i, index in enumerate(members)}
        if not self._numbers:
            return {}
        keys = {index: self._key(member) for index, member in members.items()}
        return {i: self._numbers[key] for i, key in keys.items() if key in self._numbers}

    def check_known(self, members: Sequence[Any]) -> None:
        """Raise InvalidArgumentError if lists contain what is none of ``members``."""
        known = {self._key(member) for member in members}
        for key, number in self._numbers.items():
            if key not in known:
                raise self._unknown(number, self._labels[key])

    def _put(self, member: Any, number: int) -> None:
        key, label = self._key(member), _label(member)
        if key is None:
            raise self._unknown(number, label)
        self._labels[key] = label
        before = self._numbers.setdefault(key, number)
        if before != number:
            raise FrontEndArgumentError(f"{label} is in groups {before} and {number}: give it once")

    def _unknown(self, number: int, label: str) -> FrontEndArgumentError:
        return FrontEndArgumentError(
            f"groups[{number}] contains {label}, which the optimizer does not change: give lists "
            f"of {self._members}"
        )


def _is_group(value: object) -> bool:
    return isinstance(value, Iterable) and not hasattr(value, "shape")  # a tensor is iterable, too


def _label(member: Any) -> str:
    kind, shape = type(member).__name__, getattr(member, "shape", None)
    if shape is None:
        return f"a {kind}"
    name = getattr(member, "name", None)
    return f"a {kind} of shape {tuple(shape)}" + (f" named '{name}'" if name else "")
