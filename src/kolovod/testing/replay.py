"""What an elastic job has computed, computed again in one process: were steps lost, or torn?

An elastic job with a `kolovod.elastic.MembershipLog` in its state knows who took part in each step.
From that ``replay`` makes the same steps, with every rank's gradients added in the same order by
the same engine, so the weights are the same bit for bit: after the last step, and after each of
which the log has checksums. A step that was lost, counted twice, or used in part by somebody, a
tensor that a dead rank left half written: each shows as the first difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.ops import Average, Op, Sum
from kolovod.elastic.membership_log import LoggedStep, MembershipLog, checksums
from kolovod.errors import InvalidArgumentError
from kolovod.testing.loopback import Loopback, loopback

__all__ = ["Part", "ReplayDiffers", "replay"]

Tensors = Mapping[str, Any]
_NAMED = 3
"""So many of the tensors that differ are named."""


class Part(NamedTuple):
    """What one process did in a step."""

    step: int
    """How many steps there were before."""
    member: int
    """The process, by a number that no other one of the job has."""
    rank: int
    """Its rank as the step began: what ``kolovod.rank()`` said after the ``commit`` before."""
    size: int
    """How many ranks there were then. Some may have been lost since, whose gradients are missing."""


class ReplayDiffers(AssertionError):
    """The job is not what its replay is. ``step``: the first one; ``tensors``: which differ."""

    def __init__(self, message: str, step: int, tensors: Sequence[str] = ()) -> None:
        """Use ``replay``."""
        super().__init__(message)
        self.step = step
        self.tensors = tuple(tensors)


def replay(
    log: MembershipLog,
    compute: Callable[[Part], Tensors],
    apply: Callable[[Tensors], None],
    tensors: Callable[[], Tensors] | None = None,
    *,
    op: Op = Average,
) -> None:
    """Make the steps of ``log`` again, from the weights that the job began with.

    ``compute(part)``: the gradients by name that ``part.member`` has sent in step ``part.step``,
    from the weights as they are: NumPy's arrays, or PyTorch's tensors, new ones on each call.
    ``apply(gradients)``: changes the weights by the combined ones. ``tensors()``: the weights, as
    the job has given them to its log; they are compared with it after each step of which it has
    checksums. ``op``: how the job combines gradients, Average or Sum.

    Raises ReplayDiffers for the first step after which they differ; InvalidArgumentError where
    there is nothing to compare, though ``tensors`` is given, or ``compute`` makes no sense.
    Without ``tensors`` compare the weights afterwards.
    """
    if op not in (Average, Sum):
        raise InvalidArgumentError(f"op is {op!r}: gradients are combined by Average or Sum")
    if tensors is not None and not any(step.sums for step in log.steps):
        raise InvalidArgumentError(
            f"the log has no checksums in its {len(log.steps)} steps: give the job's log the "
            "weights, MembershipLog(tensors)"
        )
    before: dict[str, int] | None = None
    with _Adding(op) as adding:
        for number, step in enumerate(log.steps):
            _check_members(number, step)
            if tensors is not None and step.sums is not None:
                before = checksums(tensors())
            size = len(step.began)
            parts = [Part(number, m, step.began.index(m), size) for m in step.used]
            hosts = [log.hosts.get(member, "") for member in step.used]
            apply(adding.add([compute(part) for part in parts], hosts))
            if tensors is not None and step.sums is not None:
                _compare(number, step, before or {}, checksums(tensors()))


def _check_members(number: int, step: LoggedStep) -> None:
    strangers = sorted(set(step.used) - set(step.began))
    if strangers or not step.used or len(set(step.used)) < len(step.used):
        raise ReplayDiffers(
            f"step {number} has used the gradients of the members {list(step.used)}, and began "
            f"with {list(step.began)}: nobody joins in the middle of a step, and each counts once",
            number,
        )


def _compare(
    number: int, step: LoggedStep, before: Mapping[str, int], own: Mapping[str, int]
) -> None:
    logged = step.sums or {}
    if logged.keys() != own.keys():
        raise ReplayDiffers(
            f"step {number}: the log is of the tensors {sorted(logged)}, tensors() gives "
            f"{sorted(own)}",
            number,
            sorted(logged.keys() ^ own.keys()),
        )
    wrong = [name for name in own if own[name] != logged[name]]
    if not wrong:
        return
    listed = ", ".join(repr(name) for name in wrong[:_NAMED])
    listed += f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    hint = ""
    if all(before.get(name) == logged[name] for name in wrong):
        hint = "; in the job they are as they were before the step, as if it had been left out"
    raise ReplayDiffers(
        f"step {number} of the members {list(step.used)} is the first that differs, in {listed} "
        f"({len(wrong)} of {len(own)} tensors){hint}",
        number,
        wrong,
    )


class _Adding:
    """Adds up gradients as ranks do that are on these hosts: there is an order of addition."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._worlds: dict[tuple[bool, tuple[int, ...]], Loopback[Any]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Adding:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def add(self, gradients: Sequence[Tensors], hosts: Sequence[str]) -> Tensors:
        """By rank, what each has, and where it is."""
        names = sorted(gradients[0])
        for other in gradients[1:]:
            if sorted(other) != names:
                raise InvalidArgumentError(
                    f"compute() gives gradients of {names} for one part of a step, of "
                    f"{sorted(other)} for another: give zeros where a rank has none"
                )
        if len(gradients) == 1 or not names:
            return gradients[0]
        world = self._world(hosts, gradients[0][names[0]])
        lists = [[mine[name] for name in names] for mine in gradients]
        results = world.run(
            lambda verbs: verbs.grouped_allreduce(lists[verbs.world().rank], "replay", self._op)
        )
        return dict(zip(names, results[0], strict=True))

    def _world(self, hosts: Sequence[str], example: Any) -> Loopback[Any]:
        known = list(dict.fromkeys(hosts))
        places = tuple(known.index(host) for host in hosts)
        torch = sys.modules.get("torch")
        is_torch = torch is not None and isinstance(example, torch.Tensor)
        found = self._worlds.get((is_torch, places))
        if found is None:
            frontend: Any = NumpyFrontend()
            if is_torch:
                from kolovod.torch import TorchFrontend

                frontend = TorchFrontend()
            opened = loopback(len(places), frontend, hosts=places)
            found = self._worlds[is_torch, places] = self._stack.enter_context(opened)
        return found
