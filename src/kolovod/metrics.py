"""Metrics of all ranks together: averaged by numbers of samples, or gathered without duplicates.

Samplers give every rank equally many samples by giving some twice. A mean over ranks counts those
twice, and a rank with a small last batch as much as the others. Instead::

    totals = average_metrics({"loss": loss_sum / n, "accuracy": hits / n}, samples=n)
    predictions = gather_samples(outputs, len(dataset))  # in the dataset's order, each once

These work on NumPy arrays, those of ``kolovod.torch`` on tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kolovod.core.collectives import Collectives
from kolovod.core.frontend import plain_dtype
from kolovod.core.objects import Objects
from kolovod.core.submission import Group
from kolovod.errors import HelperArgumentError, MismatchError
from kolovod.numpy import collectives as _on_arrays

__all__ = ["Metrics", "average_metrics", "gather_samples"]

T = TypeVar("T")
Positions = npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """The facts that a rank tells of its rows before they are sent."""

    problem: str
    length: int
    dtype: int
    shape: tuple[int, ...]
    indices: Positions | None


class Metrics:
    """Computes metrics over one world, on the tensors of one framework."""

    def __init__(self, collectives: Collectives) -> None:
        """``collectives``: on the tensors that ``gather_samples`` is to take."""
        self._collectives = collectives
        self._objects = Objects(collectives.world)

    def average_metrics(
        self,
        metrics: Mapping[str, Any],
        samples: float = 1,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> dict[str, float]:
        """Return the mean of each metric over all ranks' samples; the same, bit for bit, on each.

        ``metrics``: numbers, or arrays and tensors of one element, each the mean over this rank's
        samples. ``samples``: how many those are, or another weight, at least 0. What a rank without
        samples says is not looked at, so it may say nothing, or NaN. Where no rank has any, the
        means are NaN.

        Raises, on every rank, MismatchError when ranks name different metrics, and
        InvalidArgumentError for what is no number, and for weights that are negative or infinite.
        """
        problem, numbers, weight = _checked(metrics, samples)
        said = self._objects.allgather_object((problem, numbers, weight), name, process_set)
        ranks = self._ranks(process_set, len(said))
        _raise_problems(ranks, [problem for problem, _, _ in said])
        counted = [(r, m, w) for r, (_, m, w) in zip(ranks, said, strict=True) if w > 0]
        if not counted:
            return dict.fromkeys((key for _, m, _ in said for key in m), math.nan)
        first, known, _ = counted[0]
        for rank, theirs, _ in counted:
            if theirs.keys() != known.keys():
                raise MismatchError(_difference(first, set(known), rank, set(theirs)))
        total = sum(w for _, _, w in counted)
        return {key: sum(m[key] * w for _, m, w in counted) / total for key in known}

    def gather_samples(
        self,
        rows: T,
        length: int,
        indices: Iterable[int] | None = None,
        name: str | None = None,
        process_set: Group | None = None,
    ) -> T:
        """Return the rows of a dataset's samples, in its order, each once; the same on every rank.

        ``rows``: (this rank's samples, ...), one row for each index that the rank's sampler gave,
        duplicates included; the other dimensions and the dtype agree between ranks that have any.
        ``length``: how many samples the dataset has. ``indices``: of ``rows`` in the dataset, which
        is ``list(sampler)`` in the same epoch; None: rank, rank + size, and so on, as without
        shuffling in ``kolovod.data.ShardedSampler`` and torch's ``DistributedSampler``.

        Returns (length, ...). Raises, on every rank, InvalidArgumentError when rows and indices do
        not fit, or no rank has a certain sample; MismatchError when ranks name different lengths,
        or their rows differ in shape or dtype.
        """
        mine = self._described(rows, length, indices)
        said = self._objects.allgather_object(mine, name and f"{name}.rows", process_set)
        ranks = self._ranks(process_set, len(said))
        _raise_problems(ranks, [theirs.problem for theirs in said])
        for rank, theirs in zip(ranks, said, strict=True):
            if theirs.length != said[0].length:
                raise MismatchError(
                    f"gather_samples: the length is {said[0].length} on rank {ranks[0]}, "
                    f"{theirs.length} on rank {rank}; give the dataset's"
                )
        order = _order(ranks, said)
        if not mine.shape[0]:  # and so perhaps made without knowing what the others' are like
            like = next((theirs for theirs in said if theirs.shape[0]), mine)
            nothing = np.empty(1, np.uint8)[:0]  # with a stride, which empty(0) has not
            shape = 0, *like.shape[1:]
            frontend = self._collectives.frontend
            dtype = plain_dtype(like.dtype)  # where it is, is said by this rank's rows
            rows = frontend.placed(frontend.from_bytes(nothing, dtype, shape), rows)
        gathered: Any = self._collectives.allgather(rows, name, process_set)
        result: T = gathered[order]
        return result

    def _described(self, rows: T, length: int, indices: Iterable[int] | None) -> _Rows:
        """Return the facts; of a problem the others, which wait, hear before it is raised."""
        try:
            length = index(length)
            if length < 0:
                raise HelperArgumentError(f"length is {length}: give the dataset's")
            dtype, shape, _, _ = self._collectives.frontend.view(rows)
            if not shape:
                raise HelperArgumentError("rows is a scalar: give one row for each sample")
            places = None
            if indices is not None:
                places = np.fromiter(map(index, indices), np.int64)
                _check_places(places, shape[0], length)
        except (TypeError, ValueError) as error:
            return _Rows(str(error), 0, 0, (0,), None)
        return _Rows("", length, dtype, tuple(shape), places)

    def _ranks(self, process_set: Group | None, count: int) -> list[int]:
        return list(range(count)) if process_set is None else process_set.ranks


def _checked(metrics: Mapping[str, Any], samples: float) -> tuple[str, dict[str, float], float]:
    """Return what is wrong, or "" if nothing is; the metrics as floats; the weight."""
    try:
        weight = float(samples)
        if not 0 <= weight < math.inf:
            return f"samples is {samples!r}: give a number of samples", {}, 0.0
        if not weight:
            return "", dict.fromkeys(metrics, math.nan), weight
        numbers = {}
        for key, value in metrics.items():
            try:
                if isinstance(value, str | bytes):
                    raise TypeError
                numbers[key] = float(value.item() if hasattr(value, "item") else value)
            except (TypeError, ValueError, RuntimeError):
                return f"metrics[{key!r}] is {value!r}: give a number", {}, 0.0
    except (AttributeError, TypeError, ValueError):
        return f"metrics is {metrics!r}, samples {samples!r}: give a dict and a number", {}, 0.0
    return "", numbers, weight


def _difference(first: int, known: set[str], rank: int, theirs: set[str]) -> str:
    parts = [
        f"rank {here} has {', '.join(map(repr, sorted(mine - others, key=str)))}, rank {there} not"
        for here, mine, there, others in (
            (first, known, rank, theirs),
            (rank, theirs, first, known),
        )
        if mine - others
    ]
    return f"the ranks' metrics differ: {'; '.join(parts)}; a rank without samples gives samples=0"


def _raise_problems(ranks: list[int], problems: list[str]) -> None:
    for rank, problem in zip(ranks, problems, strict=True):
        if problem:
            raise HelperArgumentError(f"rank {rank}: {problem}")


def _check_places(places: Positions, count: int, length: int) -> None:
    if len(places) != count:
        raise HelperArgumentError(
            f"{count} rows for {len(places)} indices: give one row for each index of the sampler"
        )
    outside = places[(places < 0) | (places >= length)]
    if outside.size:
        raise HelperArgumentError(f"index {outside[0]} is not in a dataset of {length}")


def _order(ranks: list[int], said: list[_Rows]) -> Positions:
    """Return the place of each sample's row among the ranks' rows, one rank's after the other's."""
    size, length = len(said), said[0].length
    parts = []
    for place, (rank, theirs) in enumerate(zip(ranks, said, strict=True)):
        count = theirs.shape[0]
        if theirs.indices is None and count > -(-length // size):
            raise HelperArgumentError(
                f"rank {rank} has {count} rows, but of {length} samples on {size} ranks each has "
                f"at most {-(-length // size)}"
            )
        strided = np.arange(count, dtype=np.int64) * size + place
        parts.append(strided if theirs.indices is None else theirs.indices)
    places = np.concatenate(parts)
    order = np.full(length, -1, np.int64)
    rows = np.flatnonzero(places < length)[::-1]  # so that the first of several is written last
    order[places[rows]] = rows
    missing = np.flatnonzero(order < 0)
    if missing.size:
        raise HelperArgumentError(
            f"no rank has a row for sample {missing[0]} ({missing.size} of {length} are missing): "
            "each rank gives a row for each index of its sampler; with drop_last, give the length "
            "that is left; of a shuffled dataset, give indices=list(sampler)"
        )
    return order


_metrics: Metrics = Metrics(_on_arrays)

average_metrics = _metrics.average_metrics
gather_samples = _metrics.gather_samples
