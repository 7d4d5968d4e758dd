"""Computes again, in one process, what an elastic job has computed: no step may be lost, or torn.

An elastic job with a `kolovod.elastic.MembershipLog` in its state knows who took part in each step.
From that ``replay`` makes the same steps, with every rank's gradients added in the same order, so
the weights are the same bit for bit: after the last step, and after each of which the log has
checksums. A step that was lost, counted twice, or used in part by somebody, a
tensor that a dead rank left half written: each shows as the first difference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.ops import Average, Op, Sum
from kolovod.elastic.membership_log import LoggedStep, MembershipLog, checksums
from kolovod.errors import HelperArgumentError
from kolovod.testing.loopback import Loopback, loopback

__all__ = ["ReplayDiffers", "replay"]

Tensors = Mapping[str, Any]
_IN_ORDER = 88
"""So many ranks of one host add in their order; the engines of other worlds are asked.

See docs/design/allreduce.md.
"""
_NAMED = 3
"""So many of the tensors that differ are named."""


class ReplayDiffers(AssertionError):
    """The job is not what its replay is. ``step``: the first one; ``tensors``: which differ."""

    def __init__(self, message: str, step: int, tensors: Sequence[str] = ()) -> None:
        """Use ``replay``."""
        super().__init__(message)
        self.step = step
        self.tensors = tuple(tensors)


def replay(
    log: MembershipLog,
    compute: Callable[[int, int], Tensors],
    apply: Callable[[dict[str, Any]], None],
    tensors: Callable[[], Tensors] | None = None,
    *,
    op: Op = Average,
) -> None:
    """Make the steps of ``log`` again, from the weights that the job began with.

    ``compute(step, member)``: the gradients by name that this member has sent in this step, counted
    from 0, from the weights as they are: NumPy's arrays, or PyTorch's tensors, new ones on each
    call.
    ``apply(gradients)``: changes the weights by the combined ones. ``tensors()``: the weights, as
    the job has given them to its log; they are compared with it after each step of which it has
    checksums. ``op``: how the job combines gradients, Average or Sum.

    Raises ReplayDiffers for the first step after which they differ; InvalidArgumentError where
    there is nothing to compare, though ``tensors`` is given, or ``compute`` makes no sense.
    Without ``tensors`` compare the weights afterwards.
    """
    if op not in (Average, Sum):
        raise HelperArgumentError(f"op is {op!r}: gradients are combined by Average or Sum")
    if tensors is not None and not any(step.sums for step in log.steps):
        raise HelperArgumentError(
            f"the log has no checksums in its {len(log.steps)} steps: give the job's log the "
            "weights, MembershipLog(tensors)"
        )
    before: dict[str, int] | None = None
    with closing(_Adding(op)) as adding:
        for number, step in enumerate(log.steps):
            _check_members(number, step)
            if tensors is not None and step.sums is not None:
                before = checksums(tensors())
            hosts = [log.hosts.get(member, "") for member in step.used]
            apply(adding.add([compute(number, member) for member in step.used], hosts))
            if tensors is not None and step.sums is not None:
                _compare(number, step, before or {}, checksums(tensors()))


def _check_members(number: int, step: LoggedStep) -> None:
    if not step.used or len(set(step.used)) < len(step.used):
        raise ReplayDiffers(
            f"step {number} has used the gradients of the members {list(step.used)}: there is one "
            "at least, and each counts once",
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


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _combined(values: Sequence[Any], op: Op) -> Any:
    """Combine by NumPy, in the order of ranks, rounding once if the dtype has 16 bits."""
    kinds = {str(value.dtype) for value in values}
    if len(kinds) > 1 or not kinds.pop().endswith(("float16", "float32", "float64")):
        dtypes = ", ".join(str(value.dtype) for value in values)
        raise HelperArgumentError(f"gradients of dtype {dtypes}: give floats of one dtype")
    total = _wide(values[0]).copy()
    for value in values[1:]:
        total += _wide(value)
    if op == Average:
        total /= total.dtype.type(len(values))
    if not _is_torch(values[0]):
        return total.astype(values[0].dtype)
    return sys.modules["torch"].from_numpy(total).to(values[0].dtype)


def _wide(value: Any) -> Any:
    if not _is_torch(value):
        return value.astype(np.float32) if value.itemsize == 2 else value
    value = value.detach().cpu()
    return (value.float() if value.element_size() == 2 else value).numpy()


class _Adding:
    """Adds up gradients as ranks do that are on these hosts: there is an order of addition."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self._worlds: dict[tuple[bool, tuple[int, ...]], Loopback[Any]] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        """Leave the worlds that additions have asked."""
        self._stack.close()

    def add(self, gradients: Sequence[Tensors], hosts: Sequence[str]) -> dict[str, Any]:
        """Combine ``gradients``, what each rank has, by rank; ``hosts``: where each is."""
        names = sorted(gradients[0])
        for other in gradients[1:]:
            if sorted(other) != names:
                raise HelperArgumentError(
                    f"compute() gives gradients of {names} for one member, of "
                    f"{sorted(other)} for another: give zeros where a rank has none"
                )
        if len(gradients) == 1 or not names:
            return dict(gradients[0])
        if len(gradients) <= _IN_ORDER and len(set(hosts)) == 1:
            lists = {name: [mine[name] for mine in gradients] for name in names}
            return {name: _combined(values, self._op) for name, values in lists.items()}
        world = self._world(hosts, gradients[0][names[0]])
        by_rank = [[mine[name] for name in names] for mine in gradients]
        results = world.run(
            lambda verbs: verbs.grouped_allreduce(by_rank[verbs.world().rank], "replay", self._op)
        )
        return dict(zip(names, results[0], strict=True))

    def _world(self, hosts: Sequence[str], example: Any) -> Loopback[Any]:
        known = list(dict.fromkeys(hosts))
        places = tuple(known.index(host) for host in hosts)
        is_torch = _is_torch(example)
        found = self._worlds.get((is_torch, places))
        if found is None:
            frontend: Any = NumpyFrontend()
            if is_torch:
                from kolovod.torch import TorchFrontend

                frontend = TorchFrontend()
            opened = loopback(len(places), frontend, hosts=places)
            found = self._worlds[is_torch, places] = self._stack.enter_context(opened)
        return found
