"""The exchanges by which ranks of a new world agree on who takes what: one, or two if one came."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from kolovod.elastic.sampling import Progress, Rules
from kolovod.elastic.speeds import is_due, shares_of
from kolovod.errors import ElasticArgumentError, MismatchError

__all__ = ["Terms", "agree"]

Terms = tuple[Rules, bool, int]
"""What all ranks' samplers must have alike: the rules, shuffle and seed."""


class _Report(NamedTuple):
    """The facts that a rank reports where the ranks change."""

    member: int
    terms: Terms
    at: str
    """The place where it is, in words."""
    mark: str
    """A text that only ranks with the same progress have alike; empty for a rank that has come."""
    drawn: int
    """The number of batches of the plan that it has drawn."""
    speed: float
    """Samples a second, where samples are shared by speed; 0: not known."""


def agree(
    member: int,
    terms: Terms,
    progress: Progress,
    drawn: int,
    speed: float,
    offer: Callable[[], Progress] | None,
    *,
    takes_part: bool,
) -> Generator[Any, list[Any], Progress]:
    """Return the progress among the new ranks; yield what is to be gathered from all of them.

    ``offer``: of a rank that has come, what it would begin with if all have; None of one that has
    been in ``progress`` as ``member``. ``speed``: of this rank, in samples a second.
    ``takes_part``: see ``Progress.change``. Each list that is sent must be the same on all its
    ranks; the second may lack ranks of the first. Raises MismatchError on all ranks if they do not
    match.
    """
    at = f"step {progress.steps_done} of epoch {progress.epoch}"
    mark = _mark(progress) if offer is None else ""
    while True:
        reports: list[_Report] = yield _Report(member, terms, at, mark, drawn, speed)
        _check(reports, member)
        placed = [report for report in reports if report.mark]
        held = {report.member: report.drawn for report in placed}
        speeds = {report.member: report.speed for report in reports}
        if len(placed) == len(reports):
            members = [report.member for report in reports]
            shares = _shares(progress, speeds, members)
            if _stays(progress, members, shares):
                return progress
            return progress.change(members, held, shares, takes_part=takes_part)
        giver = (placed or reports)[0].member
        mine = progress if offer is None else offer()
        offers: list[tuple[int, Progress | None]] = yield member, mine if member == giver else None
        for _, given in offers:
            if given is not None:
                members = [who for who, _ in offers]
                shares = _shares(given, speeds, members)
                return given.change(members, held, shares, takes_part=takes_part)
        # Who had it is gone: once more, among the others.


def _shares(
    progress: Progress, speeds: Mapping[int, float], members: Sequence[int]
) -> dict[int, int]:
    plan = progress.plan
    return shares_of(speeds, members, plan.shares_by_member) if plan.rules.by_speed else {}


def _stays(progress: Progress, members: Sequence[int], shares: Mapping[int, int]) -> bool:
    """Return whether the ranks were asked for their speeds, and nothing is to be changed."""
    plan = progress.plan
    is_whole = not (progress.idle or progress.has_lost)
    is_same = tuple(members) == plan.members and shares == plan.shares_by_member
    return plan.rules.by_speed and is_whole and is_same and is_due(progress.settled)


def _mark(progress: Progress) -> str:
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
                f"rank {rank} has a sampler with (rules, shuffle, seed) = {report.terms}, but rank "
                f"{reports.index(first)} one with {first.terms}"
            )
        if report.mark and report.mark != first.mark:
            raise MismatchError(
                f"rank {rank}'s sampler is at {report.at}, but rank {reports.index(first)}'s at "
                f"{first.at}, or has been at another one: is each step recorded on all ranks?"
            )
