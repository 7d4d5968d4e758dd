"""The exchanges by which ranks of a new world agree on who takes what: one, or two if one came."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from kolovod.errors import ElasticArgumentError, MismatchError

__all__ = ["Dealt", "Terms", "agree"]


class Said(NamedTuple):
    """The facts that a rank tells of itself where data are dealt anew."""

    drawn: int = 0
    """The number of batches of the plan that it has drawn."""
    speed: float = 0.0
    """Samples a second, where samples are shared by speed; 0: not known."""


class Dealt(Protocol):
    """A progress of dealt data; its ``repr`` says all that ranks must have alike."""

    @property
    def epoch(self) -> int: ...

    @property
    def steps_done(self) -> int: ...

    def change(
        self: P, members: Sequence[int], said: Mapping[int, Said], *, takes_part: bool
    ) -> P: ...


P = TypeVar("P", bound=Dealt)


class Terms(NamedTuple):
    """Settings that all ranks must have alike."""

    kind: str
    """What has them: a sampler."""
    names: str
    values: tuple[Any, ...]


class _Report(NamedTuple):
    """The facts that a rank reports where the ranks change."""

    member: int
    terms: Terms
    at: str
    """The place where it is, in words."""
    mark: str
    """A text that only ranks with the same progress have alike; empty for a rank that has come."""
    said: Said


def agree(
    member: int,
    terms: Terms,
    progress: P,
    said: Said,
    offer: Callable[[], P] | None,
    *,
    takes_part: bool,
) -> Generator[Any, list[Any], P]:
    """Return the progress among the new ranks; yield what is to be gathered from all of them.

    ``offer``: of a rank that has come, what it would begin with if all have; None of one that has
    been in ``progress`` as ``member``. ``takes_part``: see ``Progress.change``. Each list that is
    sent must be the same on all its ranks; the second may lack ranks of the first. Raises
    MismatchError on all ranks if they do not match.
    """
    at = f"step {progress.steps_done} of epoch {progress.epoch}"
    mark = _mark(progress) if offer is None else ""
    while True:
        reports: list[_Report] = yield _Report(member, terms, at, mark, said)
        _check(reports, member)
        placed = [report for report in reports if report.mark]
        heard = {
            report.member: report.said if report.mark else report.said._replace(drawn=0)
            for report in reports
        }
        if len(placed) == len(reports):
            members = [report.member for report in reports]
            return progress.change(members, heard, takes_part=takes_part)
        giver = (placed or reports)[0].member
        mine = progress if offer is None else offer()
        offers: list[tuple[int, P | None]] = yield member, mine if member == giver else None
        for _, given in offers:
            if given is not None:
                return given.change([who for who, _ in offers], heard, takes_part=takes_part)
        # Who had it is gone: once more, among the others.


def _mark(progress: Dealt) -> str:
    return hashlib.sha256(repr(progress).encode()).hexdigest()


def _check(reports: list[_Report], member: int) -> None:
    """Raise an error if the ranks cannot have a common plan: the same on all of them."""
    members = [report.member for report in reports]
    if len(set(members)) < len(members) or member not in members:
        raise ElasticArgumentError(
            f"allgather has returned reports of members {members} on member {member}: need each "
            "once, this one too"
        )
    first = next((report for report in reports if report.mark), reports[0])
    for rank, report in enumerate(reports):
        if report.terms != first.terms:
            raise MismatchError(
                f"rank {rank} has a {report.terms.kind} with {report.terms.names} = "
                f"{report.terms.values}, but rank {reports.index(first)} "
                f"{_relative(first.terms, report.terms)} {first.terms.values}"
            )
        if report.mark and report.mark != first.mark:
            raise MismatchError(
                f"rank {rank}'s {report.terms.kind} is at {report.at}, but rank "
                f"{reports.index(first)}'s at {first.at}, or has been at another one: is each step "
                "recorded on all ranks?"
            )


def _relative(terms: Terms, to: Terms) -> str:
    if terms.kind == to.kind:
        return "one with"
    return f"a {terms.kind} with {terms.names} ="
