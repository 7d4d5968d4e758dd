"""Ranks that should be alike make sure that they are, in messages that a step sends anyway.

Each rank gives, of what should be equal, a hash and its complement, byte by byte. Combined by Max
these are the largest and (the complement of) the smallest byte that any rank has: they fit together
where all ranks have the same. A rank that has no opinion gives zeros. Only where something differs
ranks tell each other what they have, so that the message can name rank and parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kolovod import notices
from kolovod.core import world as worlds
from kolovod.errors import MismatchError
from kolovod.notices import report_to_stderr

__all__ = [
    "BYTES",
    "KINDS",
    "NOT_FINITE",
    "OPTIONS",
    "OPTIONS_IN_STEP",
    "STEPS",
    "WEIGHTS",
    "Facts",
    "Like",
    "digest",
    "follow_from",
    "of_gradients",
    "policy",
    "said_of",
    "sample_of",
    "tell",
    "text_of",
    "use",
    "warn",
    "which_differ",
]

T = TypeVar("T")

_HASH = 8
STEPS, OPTIONS, OPTIONS_IN_STEP, WEIGHTS = range(4)
"""The number of steps taken; options at the end of backward, or in ``step``; parameters."""
KINDS = 4
NOT_FINITE = "are not finite (inf or nan) in"
"""The words of a message about gradients."""
BYTES = KINDS * 2 * _HASH
_NO_OPINION = bytes(2 * _HASH)
_COMPLEMENT = bytes(range(255, -1, -1))
"""For each byte what it lacks to 255."""

_policy: str | None = None  # in place of the setting

Options = Mapping[str, Mapping[str, Any]]
"""The learning rate and so on, by parameter group (its first parameter's name)."""


class Facts(NamedTuple):
    """The facts of one rank, which ranks compare where something differs."""

    steps: int | None
    """The number of steps taken; None: nobody knows."""
    options: Options
    weights: Sequence[tuple[str, int]]
    """The name and the hash of each parameter."""


class Like(NamedTuple):
    """The optimizer and the ranks that are compared."""

    optimizer: str
    ranks: Sequence[int]
    """The ranks of the world that should be alike."""
    broadcast: str = "broadcast_variables"
    """The function that has made them alike, where the number of steps is not known."""


def use(how: str | None) -> None:
    """Let ``policy`` be this, whatever is set; None: what is set. The same on all ranks."""
    global _policy
    _policy = how


def policy() -> str:
    """``warn``, ``error`` or ``off``: the setting of this process's world."""
    if _policy is not None:
        return _policy
    return worlds.current().settings.sentinel if worlds.is_initialized() else "warn"


def digest(text: str) -> bytes:
    """Return a hash of ``text``: options or numbers, written out."""
    return hashlib.blake2b(text.encode(), digest_size=_HASH).digest()


def said_of(kind: int, hashed: bytes | None) -> tuple[slice, bytes]:
    """Return the slice of the ``BYTES`` for a fact, and this rank's bytes; None: no opinion."""
    place = slice(kind * 2 * _HASH, (kind + 1) * 2 * _HASH)
    return place, _NO_OPINION if hashed is None else hashed + hashed.translate(_COMPLEMENT)


def which_differ(combined: bytes | bytearray) -> list[int]:
    """The kinds of facts that ranks have not alike. ``combined``: all ranks' ``BYTES``, by Max."""
    found = []
    for kind in range(KINDS):
        both = combined[kind * 2 * _HASH : (kind + 1) * 2 * _HASH]
        # The largest byte and the largest complement are one byte's if all have that byte.
        if both[:_HASH].translate(_COMPLEMENT) != both[_HASH:] and any(both):
            found.append(kind)
    return found


def text_of(kinds: Sequence[int], said: Sequence[Facts], like: Like) -> str:
    """Return the message that says what differs, and what usually causes it."""
    taken = said[0].steps
    when = "" if taken is None else f" step {taken + 1} of"
    where = f"ranks are not alike in{when} {like.optimizer}: "
    if STEPS in kinds:
        steps = _by_value([facts.steps for facts in said], like.ranks)
        return where + (
            f"{_list(steps, 'has taken {} steps', 'have taken {} steps')}. All ranks must step "
            "equally often: a rank that skips a step, or has one batch more, trains another model"
        )
    if OPTIONS in kinds or OPTIONS_IN_STEP in kinds:
        group, option = _first_option(said)
        values = [facts.options.get(group, {}).get(option) for facts in said]
        return where + (
            f"option '{option}' of the parameters from '{group}' on: "
            f"{_list(_by_value(values, like.ranks), 'has {}', 'have {}')}. Schedules must decide "
            "alike on all ranks: give them numbers that are averaged over the ranks (the loss for "
            "ReduceLROnPlateau), or decide on one rank and broadcast_object"
        )
    names = [name for name, _ in said[0].weights]
    columns = [[facts.weights[i][1] for facts in said] for i in range(len(names))]
    differing = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if not differing:  # they have changed since, on another thread say
        return where + "parameters that were being written to while they were compared"
    first = differing[0]
    groups = _by_value(columns[first], like.ranks)
    others = "" if len(differing) == 1 else f" and {len(differing) - 1} other(s)"
    most = max(groups.values(), key=len)
    odd = [rank for ranks in groups.values() if ranks is not most for rank in ranks]
    who = (
        f"{_ranks(odd)} {'has' if len(odd) == 1 else 'have'} other values than {_ranks(most)}"
        if len(most) > 1
        else "each rank has values of its own"
    )
    what = f"{where}parameter '{names[first]}'{others}: {who}. "
    if taken == 0:
        return what + (
            "Begin with the same parameters: broadcast_parameters(model.state_dict(), root_rank=0) "
            "after the model is made or loaded"
        )
    if taken is None:
        before = f"If {like.broadcast} has made them equal in the beginning"
        rates = "a learning rate that is not the same on all ranks, "
    else:
        before, rates = "They were equal before", ""
    return what + (
        f"{before}: look for what changes parameters on some ranks only ({rates}a checkpoint that "
        "one rank loads, an optimizer that is not distributed, random numbers in a weight update, "
        "a step that one rank skips)"
    )


def of_gradients(ranks: Sequence[int], step: str, name: str, others: int = 0) -> str:
    """Return the message about ``ranks`` (empty: several) whose gradients are not finite.

    ``name``: the first parameter; ``others``: how many more are known.
    """
    who = _ranks(ranks) if ranks else "several ranks"
    more = f" and {others} other(s)" if others else ""
    return (
        f"gradients of {who} {NOT_FINITE} {step}, before they are averaged: of '{name}'{more}. "
        "They make the parameters of all ranks so: look at that rank's batch, at what the loss "
        "divides by or takes the logarithm of, and at the learning rate"
    )


def sample_of(items: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` of the items: the first, the last, and some between them."""
    if not items:
        return []
    places = np.linspace(0, len(items) - 1, most, dtype=int)
    return [items[i] for i in dict.fromkeys(places.tolist())]


def follow_from(kinds: Collection[int]) -> set[int]:
    """Return these, and what needs no words any more once they have been told."""
    return set(kinds) if set(kinds) == {WEIGHTS} else set(range(KINDS))


def tell(text: str, *, is_first: bool) -> None:
    """Warn, on one rank (``is_first``), or raise MismatchError on all."""
    if policy() == "error":
        raise MismatchError(f"{text} (KOLOVOD_SENTINEL=error)")
    if is_first:
        warn(text, "this is said once; KOLOVOD_SENTINEL=error makes it an error")


def warn(text: str, further: str) -> None:
    """Say it on standard error, and in ``kolovod top``; ``further``: only in the former."""
    notices.kept.append(text)
    report_to_stderr(f"{text} ({further})")


def _first_option(said: Sequence[Facts]) -> tuple[str, str]:
    for group in dict.fromkeys(group for facts in said for group in facts.options):
        groups = [facts.options.get(group, {}) for facts in said]
        for option in dict.fromkeys(option for options in groups for option in options):
            if len({repr(options.get(option)) for options in groups}) > 1:
                return group, option
    return "", ""


def _by_value(values: Sequence[Any], ranks: Sequence[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        found.setdefault(repr(value), []).append(rank)
    return found


def _list(found: Mapping[str, list[int]], of_one: str, of_several: str) -> str:
    return ", ".join(
        f"{_ranks(ranks)} {(of_one if len(ranks) == 1 else of_several).format(value)}"
        for value, ranks in found.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
