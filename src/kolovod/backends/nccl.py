"""NCCL under our negotiation, through torch.distributed: ``kolovod run --backend nccl``.

It carries what is on GPUs, one GPU for each rank; what is in host memory stays with the native
engine. The process group is constructed by itself and never registered, as Gloo's (gloo.py). NCCL's
connections are neither authenticated nor encrypted: between hosts, use it in networks that you
trust.

A rank picks its GPU by its first tensor, long after ``init``; only then do the ranks' GPUs connect.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kolovod import _native
from kolovod.backends.device_driver import DeviceDriver, DeviceGroup
from kolovod.backends.pair import EnginePair
from kolovod.backends.setup import BackendSetup, make_store
from kolovod.core.affinity import threads_on
from kolovod.core.objects import Objects
from kolovod.core.ops import Op
from kolovod.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from kolovod.backends.device_arithmetic import DeviceReduction

# Who is late or lost, the engine says: PyTorch's own watchdog would end the process.
_PATIENCE = timedelta(days=30)
_NO_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "NCCL_ASYNC_ERROR_HANDLING": "0",  # its name in PyTorch 2.1
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_WAY_OUT = (
    "give each rank a GPU of its own, or leave KOLOVOD_BACKEND unset: then tensors on GPUs go "
    "through host memory, and ranks may share a GPU"
)


class Membership(NamedTuple):
    """The world, or a process set, that a pair of engines is for."""

    engine: _native.Engine
    rank: int
    size: int


def check(engine: _native.Engine, rank: int, size: int, host: str) -> None:
    """Whether all ranks can use NCCL, as far as can be said before they have picked their GPUs.

    Collective, over the native ``engine``. Makes no CUDA context. Raises InvalidArgumentError on a
    rank that cannot, and where ranks of one host see too few GPUs; BootstrapError, naming the rank,
    on the others; RankLostError.
    """
    meeting = BackendSetup(_objects(engine, rank, size))
    try:
        seen = f"{host}\n{os.environ.get('CUDA_VISIBLE_DEVICES')}\n{_count_gpus()}"
        meeting.put(f"seen.{rank}", seen.encode())
        everybody = [meeting.get(f"seen.{r}") for r in range(size)]
        for other in sorted(set(everybody)):
            ranks = [r for r, text in enumerate(everybody) if text == other]
            name, _, count = other.decode().split("\n")
            if len(ranks) > int(count):
                raise InvalidArgumentError(
                    f"backend 'nccl': ranks {ranks} on host {name} see only {count} GPU(s): "
                    f"{_WAY_OUT}"
                )
    except Exception as error:  # of a library that we do not know
        meeting.fail(error)
        raise
    meeting.finish()


def paired(
    host: _native.Engine, device: _native.Engine, rank: int, size: int, core: int | None
) -> _native.Engine:
    """The two engines of a world or a process set as one. ``device`` is external.

    ``core``: where the driver's threads run, if they are bound to one.
    """
    driver = DeviceDriver(device, CudaDevices(_objects(host, rank, size), rank, size), rank, size)
    with threads_on(core):
        driver.start()
    # It has all methods of an engine, and is one to all but the C programs of graphs.
    return cast(_native.Engine, EnginePair(host, device, driver))


def _objects(engine: _native.Engine, rank: int, size: int) -> Objects:

    return Objects(lambda: Membership(engine, rank, size))


def _count_gpus() -> int:
    """How many GPUs this process sees. Raises InvalidArgumentError if it cannot use any."""
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise InvalidArgumentError(f"backend 'nccl' needs PyTorch ({error})") from None
    count = torch.cuda.device_count()
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        raise InvalidArgumentError(
            f"backend 'nccl' needs PyTorch with CUDA and NCCL, and this is {torch.__version__}: "
            "install that, or leave KOLOVOD_BACKEND unset"
        )
    if count == 0:
        raise InvalidArgumentError(f"backend 'nccl': this rank sees no GPU: {_WAY_OUT}")
    return count


class CudaDevices:
    """The GPUs that a rank sees; see Devices."""

    def __init__(self, objects: Objects, rank: int, size: int) -> None:
        """``objects``: over the native engine of the ranks."""
        self._objects, self._rank, self._size = objects, rank, size

    def connect(self, index: int) -> DeviceGroup:
        """See Devices.connect. Raises InvalidArgumentError when two ranks have one GPU."""
        meeting = BackendSetup(self._objects)
        try:
            group = NcclGroup(meeting, index, self._rank, self._size)
        except Exception as error:  # of a library that we do not know
            meeting.fail(error)
            raise
        meeting.finish()
        return group

    def mark(self, index: int) -> Any:
        """See Devices.mark."""
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(index))
        return event

    def nothing(self, index: int) -> torch.Tensor:
        """See Devices.nothing."""
        import torch

        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}")

    def to_host(self, index: int, address: int, dtype: int, shape: tuple[int, ...]) -> torch.Tensor:
        """See Devices.to_host."""
        from kolovod.torch.device import cuda

        count = 1
        for extent in shape:
            count *= extent
        return cuda.to_host(_tensor_at(index, address, dtype, count).view(shape))

    def to_device(self, index: int, host: torch.Tensor, address: int, dtype: int) -> None:
        """See Devices.to_device."""
        from kolovod.torch.device import cuda

        target = _tensor_at(index, address, dtype, host.numel())
        cuda.unpack(host.view(-1), [target])


class NcclGroup:
    """NCCL among all ranks' GPUs; see DeviceGroup.

    The order of additions is NCCL's own, and floats of 16 bits are rounded on the way.
    """

    def __init__(self, meeting: BackendSetup, index: int, rank: int, size: int) -> None:
        """Collective. Raises InvalidArgumentError when two ranks have one GPU."""
        import torch
        import torch.distributed
        from torch.distributed import ProcessGroupNCCL

        self._torch: Any = torch
        self._dist: Any = torch.distributed
        self._index, self._rank, self._size = index, rank, size
        _need_different(meeting, _identity(index), rank, size)
        ops = self._dist.ReduceOp
        self._ops = {Op.Sum: ops.SUM, Op.Min: ops.MIN, Op.Max: ops.MAX, Op.Product: ops.PRODUCT}
        self._stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        group: Any = ProcessGroupNCCL
        with torch.cuda.device(index), _without_watchdog():
            options = group.Options()
            options._timeout = _PATIENCE
            self._group = group(make_store(self._dist.Store, meeting), rank, size, options)
            with self.after([]):  # NCCL connects when it is used first: while the ranks meet
                self._all_add(torch.zeros(1, device=f"cuda:{index}"), Op.Sum)
                self.mark().synchronize()

    def tensor_at(self, address: int, dtype: int, count: int) -> torch.Tensor:
        """See DeviceGroup.tensor_at."""
        return _tensor_at(self._index, address, dtype, count)

    def zeros(self, dtype: int, count: int) -> torch.Tensor:
        """See DeviceGroup.zeros."""
        from kolovod.torch.frontend import BY_CODE

        zeros: torch.Tensor = self._torch.zeros(
            count, dtype=BY_CODE[dtype], device=f"cuda:{self._index}"
        )
        return zeros

    @contextmanager
    def after(self, events: Sequence[Any]) -> Iterator[None]:
        """See DeviceGroup.after."""
        for event in events:
            self._stream.wait_event(event)
        with self._torch.cuda.stream(self._stream), self._torch.no_grad():
            yield

    def mark(self) -> Any:
        """See DeviceGroup.mark."""
        event = self._torch.cuda.Event()
        event.record(self._stream)
        return event

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """See DeviceGroup.joined."""
        values: torch.Tensor = self._torch.cat(list(parts))
        return values

    def allreduce(self, values: torch.Tensor, reduction: DeviceReduction) -> torch.Tensor:
        """See DeviceGroup.allreduce."""
        values = reduction.prepared(values)
        self._all_add(values, reduction.carried_op)
        return reduction.finished(values)

    def _all_add(self, values: torch.Tensor, op: Op) -> None:
        options = self._dist.AllreduceOptions()
        options.reduceOp = self._ops[op]
        self._group.allreduce([values], options).wait()  # the stream, not the host

    def reducescatter(
        self, values: torch.Tensor, reduction: DeviceReduction, counts: Sequence[int]
    ) -> torch.Tensor:
        """See DeviceGroup.reducescatter. Unequal parts are a reduction each, to who gets it."""
        values = reduction.prepared(values)
        op = self._ops[reduction.carried_op]
        if len(set(counts)) == 1:
            part = values.new_empty(counts[0])
            options = self._dist.ReduceScatterOptions()
            options.reduceOp = op
            self._group._reduce_scatter_base(part, values, options).wait()
            return reduction.finished(part)
        parts = values.split(list(counts))  # type: ignore[no-untyped-call]
        for root, part in enumerate(parts):
            if part.numel():
                options = self._dist.ReduceOptions()
                options.reduceOp, options.rootRank = op, root
                self._group.reduce([part], options).wait()
        return reduction.finished(parts[self._rank])

    def broadcast(self, values: torch.Tensor, root: int) -> None:
        """See DeviceGroup.broadcast."""
        options = self._dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        stored = values if values.element_size() > 1 else values.view(self._torch.uint8)
        self._group.broadcast([stored.view(self._torch.uint8)], options).wait()

    def allgather(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See DeviceGroup.allgather. Unequal sizes are a broadcast each."""
        result = values.new_empty(sum(sizes))
        if len(set(sizes)) == 1:
            self._group._allgather_base(result, values).wait()
            return result
        parts = result.split(list(sizes))  # type: ignore[no-untyped-call]
        parts[self._rank].copy_(values)
        for root, part in enumerate(parts):
            if part.numel():
                self.broadcast(part, root)
        return result

    def alltoall(
        self, values: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """See DeviceGroup.alltoall."""
        result = values.new_empty(sum(received))
        self._group.alltoall_base(result, values, list(received), list(sent)).wait()
        return result

    def abort(self) -> None:
        """See DeviceGroup.abort. ``_shutdown`` is its name before PyTorch 2.6."""
        abort = getattr(self._group, "abort", None) or getattr(self._group, "_shutdown", None)
        if abort is not None:
            abort()


class _Memory:
    """Memory of a GPU, as CUDA's array interface describes it: bytes."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _tensor_at(index: int, address: int, dtype: int, count: int) -> torch.Tensor:
    import torch

    from kolovod.torch.frontend import BY_CODE

    kind, device = BY_CODE[dtype], f"cuda:{index}"
    if count == 0:
        return torch.empty(0, dtype=kind, device=device)
    memory = _Memory(address, count * kind.itemsize)
    return torch.as_tensor(memory, device=device).view(kind)


def _identity(index: int) -> str:
    """What tells this GPU from all others, of this host and of others."""
    import torch

    facts = torch.cuda.get_device_properties(index)
    unique = getattr(facts, "uuid", None)  # since PyTorch 2.4
    if unique is None:
        unique = f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {index} of {os.uname().nodename}"
    return f"{facts.name} {unique}"


def _need_different(meeting: BackendSetup, identity: str, rank: int, size: int) -> None:
    meeting.put(f"gpu.{rank}", identity.encode())
    owners: dict[bytes, int] = {}
    for other in range(size):
        gpu = meeting.get(f"gpu.{other}")
        if owners.setdefault(gpu, other) != other:
            raise InvalidArgumentError(
                f"backend 'nccl': ranks {owners[gpu]} and {other} both use the GPU "
                f"'{gpu.decode()}'; call torch.cuda.set_device(kolovod.local_rank()) before the "
                f"first tensor is on a GPU: {_WAY_OUT}"
            )


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """The group reads these while it is made; what the user has set stays."""
    ours = {name: value for name, value in _NO_WATCHDOG.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
