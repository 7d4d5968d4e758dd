"""A process group of torch.distributed over an engine, without its verbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kolovod import _native
from kolovod.c10d import DEVICE_TYPES, staging
from kolovod.c10d.flat import Flat, joined
from kolovod.c10d.groups import Leave
from kolovod.c10d.health import health
from kolovod.c10d.monitored import MonitoredBarrier, Store, seconds
from kolovod.c10d.order import Order, is_plain
from kolovod.c10d.work import Watcher, Work, is_in_backward, waiting
from kolovod.core.buffers import check_places
from kolovod.core.ops import Op
from kolovod.core.submission import EngineTensor, Request, Submitter, WorldLike
from kolovod.core.transaction import transaction
from kolovod.core.verbs import ALLREDUCE, REDUCESCATTER, Verb
from kolovod.errors import GroupArgumentError
from kolovod.private_apis.torch import NO_BACKWARD, current_backward
from kolovod.torch import held

__all__ = ["Base", "Tensors"]

Finish = Callable[[_native.Engine, int], None]
Tensors = Sequence[torch.Tensor]

_ENDED_WITH_WORLD = (
    ". In an elastic job groups end with their world: dist.group.WORLD is the present one, and a "
    "model in DDP follows it when it is in the state, as DDP has wrapped it"
)
_NOTHING = timedelta(0)
_REDUCING = (ALLREDUCE, REDUCESCATTER)
_ProcessGroup: Any = dist.ProcessGroup  # whose stub has signatures that c10d itself does not use


class Base(_ProcessGroup):  # type: ignore[misc]
    """The common part of all verbs, and what c10d wants to know of a group besides verbs."""

    def __init__(self, world: WorldLike, leave: Leave, timeout_s: float, store: Store) -> None:
        """``leave`` is called once, when the group is destroyed; ``store`` is the group's own."""
        super().__init__(world.rank, world.size)
        health.begin()
        self._monitored = MonitoredBarrier(store, world.rank, world.size)
        self._world: WorldLike | None = world  # None once it is destroyed
        self._leave: Leave | None = leave
        self._timeout_s = timeout_s
        self._submitter = Submitter(self._open_world, tells_lines=False)
        self._watcher = Watcher()
        self._order = Order()
        self._group_name = self._group_desc = ""

    def _flat(self, tensor: torch.Tensor, *, moves_only: bool = False) -> Flat:
        """Return ``Flat(tensor)``, with what operations submitted before leave in ``tensor``."""
        self._order.before_reading([tensor])
        return Flat(tensor, moves_only=moves_only)

    def _joined(self, tensors: Tensors) -> torch.Tensor:
        """Return ``joined(tensors)``, with what the operations submitted before leave in them."""
        self._order.before_reading(tensors)
        return joined(tensors)

    def _start(
        self,
        verb: Verb,
        entries: list[EngineTensor],
        opts: Any,
        *,
        outputs: Tensors,
        sources: Sequence[Flat],
        keep: object = None,
        op: int = Op.Sum,
        factor: float = 1.0,
        root: int = 0,
        finish: Finish | None = None,
        splits: Sequence[int] = (),
        out_bytes: Sequence[int] = (),
    ) -> Work:
        """Submit. ``keep``: who owns memory besides these; ``finish`` is called on completion."""
        self._order.before_writing(outputs)
        limit_s = self._timeout_s
        is_blocking = False
        if opts is not None:
            is_blocking = not opts.asyncOp
            given = opts.timeout
            if given > _NOTHING:
                limit_s = given.total_seconds()
        if verb in _REDUCING and (backward := current_backward()) != NO_BACKWARD:
            health.look(backward, entries)
        stream = staging.stream_of([*outputs, *(flat.tensor for flat in sources)])
        finish = on_stream(stream, finish)
        with waiting(for_gradients=is_blocking and is_in_backward()):
            handle = self._submitter.start(
                Request(verb, None, None, op, factor, 1.0, root),
                entries,
                (sources, outputs, keep),
                None,
                finish if is_blocking else in_place(outputs, verb, finish),
                splits,
                blocking=is_blocking,
                out_bytes=out_bytes,
            )
        work = Work(handle, list(outputs), limit_s, self._watcher, self._order, stream)
        if not is_blocking:
            self._keep(work, sources, outputs)
        return work

    def _keep(self, work: Work, sources: Sequence[Flat], outputs: Tensors) -> None:
        """Hold it until it is complete; put results on a GPU even if nobody waits for them.

        But for messages, which may come late: the watcher waits for one after the other.
        """
        self._order.add(work, [flat.dense for flat in sources], outputs)
        if work._stream is not None and not work._is_message:
            self._watcher.take(work, at_once=False, finishes=False)

    def _into(
        self,
        verb: Verb,
        pairs: Sequence[tuple[Flat, Flat]],
        opts: Any,
        *,
        op: int = Op.Sum,
        factor: float = 1.0,
        splits: Sequence[int] = (),
        finish: Finish | None = None,
    ) -> Work:
        """Start a verb whose results have another size. ``pairs``: sources and their outputs."""
        outputs = [output for _, output in pairs]
        copied = copying_back(outputs)

        def finish_all(engine: _native.Engine, number: int) -> None:
            if finish is not None:
                finish(engine, number)
            if copied is not None:
                copied(engine, number)

        return self._start(
            verb,
            [source.entry(output.address) for source, output in pairs],
            opts,
            outputs=[output.tensor for output in outputs],
            sources=[source for source, _ in pairs],
            keep=pairs,
            op=op,
            factor=factor,
            finish=None if finish is None and copied is None else finish_all,
            splits=splits,
            out_bytes=[output.bytes for output in outputs],
        )

    # the group itself ---------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Give the engine up. Called by ``destroy_process_group``; idempotent."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
            self._watcher.stop()
            self._world = None  # c10d may keep this object for good, but the engine is to go

    def abort(self) -> None:
        """End the world at once, for all ranks."""
        self._open_world().engine.abort("torch.distributed aborted the process group")

    def _open_world(self) -> WorldLike:
        if self._world is None:
            why = "" if not transaction().is_elastic else _ENDED_WITH_WORLD
            raise GroupArgumentError(f"{self!r} was destroyed: make a new one{why}")
        return self._world

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when all ranks have called it. ``timeout`` is the group's unless it is given.

        After it rank 0 raises WaitTimeoutError with the first rank that did not come, or with all
        of them; so do the others, without names they do not know.
        """
        self._open_world()
        self._monitored.wait(seconds(timeout, self._timeout_s), wait_all_ranks)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the collectives from now on."""
        self._timeout_s = timeout.total_seconds()

    def name(self) -> str:
        """Return the name of the backend."""
        return "kolovod"

    def getBackendName(self) -> str:
        """Return the name of the backend, for C++."""
        return "kolovod"

    def __repr__(self) -> str:
        return f"<kolovod process group {self._group_name}, rank {self.rank()} of {self.size()}>"

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of the tensors it takes; ``torch.distributed.checkpoint`` needs the CPU."""
        return [torch.device(kind) for kind in DEVICE_TYPES]

    # torch.distributed asks these of what carries a group's tensors on a device.
    supports_coalescing = supports_splitting = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether the group makes tensors itself: it does not."""
        return False

    def _get_backend(self, device: torch.device | str) -> Base:
        """Return what carries tensors on ``device``: the group. RuntimeError: it takes none there.

        PyTorch 2.14 asks before it sends messages in a batch, and at the start with a device_id.
        """
        kind = torch.device(device).type
        if kind not in DEVICE_TYPES:
            raise RuntimeError(
                f"the kolovod process group takes tensors on {' and '.join(DEVICE_TYPES)}, not on "
                f"{kind}"
            )
        return self

    @property
    def group_name(self) -> str:
        """The name by which torch.distributed numbers groups."""
        return self._group_name

    def getGroupName(self) -> str:
        """Return ``group_name``, for C++."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Set ``group_name``: called by torch.distributed."""
        self._group_name = name

    _set_group_name = setGroupName

    @property
    def group_desc(self) -> str:
        """The description that the user gave the group."""
        return self._group_desc

    def getGroupDesc(self) -> str:
        """Return ``group_desc``, for C++."""
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:
        """Set ``group_desc``: called by torch.distributed."""
        self._group_desc = description

    _set_group_desc = setGroupDesc


def copying_back(flats: Sequence[Flat]) -> Finish | None:
    """A ``finish`` that brings results from dense copies to the tensors; None if there are none."""
    copies = [flat for flat in flats if flat.dense is not flat.tensor]
    if not copies:
        return None

    def finish(engine: _native.Engine, number: int) -> None:
        for flat in copies:
            flat.copy_back()

    return finish


def in_place(outputs: Tensors, verb: Verb, finish: Finish | None) -> Finish | None:
    """Return ``finish``, with a check that all ``outputs`` have the memory that they have now.

    If one has other memory then, it raises InvalidArgumentError: the result is where nobody looks
    for it.
    """
    written = [(tensor, held.place_of(tensor)) for tensor in outputs if is_plain(tensor)]
    if not written:
        return finish

    def finish_here(engine: _native.Engine, number: int) -> None:
        check_places(written, held, verb.name)
        if finish is not None:
            finish(engine, number)

    return finish_here


def on_stream(stream: Any, finish: Finish | None) -> Finish | None:
    """``finish``, which puts results for a GPU on its ``stream``; None: there are none."""
    if stream is None or finish is None:
        return finish

    def finish_there(engine: _native.Engine, number: int) -> None:
        with staging.on(stream):
            finish(engine, number)

    return finish_there


def several(what: str, tensors: Tensors) -> Tensors:
    """Return one tensor, or many, as several, as c10d does. InvalidArgumentError for none."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    if not tensors:
        raise GroupArgumentError(f"{what}: no tensors were given")
    return tensors


def paired(what: str, first: Sequence[Any], second: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Both side by side; InvalidArgumentError if they are not equally many."""
    if len(first) != len(second):
        raise GroupArgumentError(f"{what}: {len(first)} inputs, but {len(second)} outputs")
    return list(zip(first, second, strict=True))
