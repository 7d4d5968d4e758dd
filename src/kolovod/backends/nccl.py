"""NCCL under our negotiation, through torch.distributed: ``kolovod run --backend nccl``.

It carries what is on GPUs, one GPU for each rank; what is in host memory stays with the native
engine. The process group is constructed by itself and never registered, as Gloo's (gloo.py). NCCL's
connections are neither authenticated nor encrypted: between hosts, use it in networks that you
trust.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kolovod.backends import nccl_errors
from kolovod.backends.process_group import OnProcessGroup
from kolovod.backends.setup import BackendSetup, make_store
from kolovod.core.ops import Op
from kolovod.errors import SettingError

if TYPE_CHECKING:
    import torch

    from kolovod.backends.base import Memory
    from kolovod.backends.setup import RankGroup

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


class NcclBackend(OnProcessGroup):
    """Collectives of a process group of NCCL's, among all ranks' GPUs.

    The order of additions is NCCL's own, and floats of 16 bits are rounded on the way. An operation
    is enqueued on the current stream, and is done when ``memory`` has settled.
    """

    def __init__(self, rank_group: RankGroup, meeting: BackendSetup) -> None:
        """Collective: see whether all ranks can use NCCL, as far as can be said already.

        Makes no CUDA context. Raises InvalidArgumentError on a rank that cannot, and where ranks of
        one host see too few GPUs; what ``meeting`` raises.
        """
        super().__init__(rank_group.rank)
        self._rank_group = rank_group
        self._errors: nccl_errors.AsyncErrors | None = None
        _need_enough(meeting, rank_group)
        self.memory = self._make_memory()

    def _make_memory(self) -> Memory:
        from kolovod.backends.gpu_memory import GpuMemory

        return GpuMemory(self._connect, self._failure)

    def _failure(self) -> str:
        """Why what is on its way will never end; "" if NCCL knows of nothing."""
        why = "" if self._errors is None else self._errors.found()
        return why and (
            f"NCCL's connections have failed, though no rank is lost: {why}. Set NCCL_DEBUG=WARN "
            "on all ranks to see which link; look at the network between the hosts"
        )

    def _connect(self, index: int) -> None:
        """Collective: make the group, whose member here is GPU ``index``.

        Raises InvalidArgumentError when two ranks have one GPU.
        """
        meeting = BackendSetup(self._rank_group.objects())
        try:
            _need_different(
                meeting, self._identity(index), self._rank_group.rank, self._rank_group.size
            )
            import torch.distributed

            self._dist = torch.distributed
            # Rank 0 sets what the others get, and waits for them within NCCL.
            store = make_store(self._dist.Store, meeting, says_at_once=True)
            self._group = self._make_group(index, store)
            self._errors = nccl_errors.of_group(self._group)
        except Exception as error:  # of a library that we do not know
            meeting.fail(error)
            raise
        meeting.finish()

    def _make_group(self, index: int, store: Any) -> Any:
        import torch
        from torch.distributed import ProcessGroupNCCL

        memory: Any = self.memory
        with torch.cuda.device(index), _without_watchdog():
            options = ProcessGroupNCCL.Options()
            options._timeout = _PATIENCE
            group: Any = ProcessGroupNCCL(
                store, self._rank_group.rank, self._rank_group.size, options
            )
            with memory.on_stream():  # NCCL connects when it is used first: while the ranks meet
                group.allreduce([torch.zeros(1, device=f"cuda:{index}")]).wait()
                memory.mark().synchronize()
        return group

    def _identity(self, index: int) -> str:
        """Return a text that tells this GPU from all others, of this host and of others."""
        import torch

        facts = torch.cuda.get_device_properties(index)
        unique = getattr(facts, "uuid", None)  # since PyTorch 2.4
        if unique is None:
            unique = f"{os.environ.get('CUDA_VISIBLE_DEVICES')} {index} of {os.uname().nodename}"
        return f"{facts.name} {unique}"

    def reducescatter(self, values: torch.Tensor, op: Op, counts: Sequence[int]) -> torch.Tensor:
        """Implement ``Backend.reducescatter``: unequal parts are a reduction each."""
        if len(set(counts)) > 1:
            return super().reducescatter(values, op, counts)  # type: ignore[no-any-return]
        part = values.new_empty(counts[0])
        options = self._dist.ReduceScatterOptions()
        options.reduceOp = self._op(op)
        self._group._reduce_scatter_base(part, values, options).wait()
        return part

    def close(self, *, is_healthy: bool) -> None:
        """Implement ``Backend.close``.

        An abort would cut off what other ranks still receive from here. PyTorch before 2.6 has no
        call to end a group in good order: there the group lives on until nothing refers to it.
        ``_shutdown`` is its abort.
        """
        if is_healthy:
            end = getattr(self._group, "shutdown", None)
        else:
            end = getattr(self._group, "abort", None) or getattr(self._group, "_shutdown", None)
        if end is not None:
            end()


def _need_enough(meeting: BackendSetup, rank_group: RankGroup) -> None:
    seen = f"{rank_group.world.host}\n{os.environ.get('CUDA_VISIBLE_DEVICES')}\n{_count_gpus()}"
    meeting.put(f"seen.{rank_group.rank}", seen.encode())
    everybody = [meeting.get(f"seen.{r}") for r in range(rank_group.size)]
    for other in sorted(set(everybody)):
        ranks = [r for r, text in enumerate(everybody) if text == other]
        name, _, count = other.decode().split("\n")
        if len(ranks) > int(count):
            raise SettingError(
                f"backend 'nccl': ranks {ranks} on host {name} see only {count} GPU(s): {_WAY_OUT}"
            )


def _count_gpus() -> int:
    """Return the number of GPUs that this process sees.

    Raises InvalidArgumentError if it cannot use any.
    """
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        raise SettingError(f"backend 'nccl' needs PyTorch ({error})") from None
    count = torch.cuda.device_count()
    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        raise SettingError(
            f"backend 'nccl' needs PyTorch with CUDA and NCCL, and this is {torch.__version__}: "
            "install that, or leave KOLOVOD_BACKEND unset"
        )
    if count == 0:
        raise SettingError(f"backend 'nccl': this rank sees no GPU: {_WAY_OUT}")
    return count


def _need_different(meeting: BackendSetup, identity: str, rank: int, size: int) -> None:
    meeting.put(f"gpu.{rank}", identity.encode())
    owners: dict[bytes, int] = {}
    for other in range(size):
        gpu = meeting.get(f"gpu.{other}")
        if owners.setdefault(gpu, other) != other:
            raise SettingError(
                f"backend 'nccl': ranks {owners[gpu]} and {other} both use the GPU "
                f"'{gpu.decode()}'; call torch.cuda.set_device(kolovod.local_rank()) before the "
                f"first tensor is on a GPU: {_WAY_OUT}"
            )


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Set what the group reads while it is made; what the user has set stays."""
    ours = {name: value for name, value in _NO_WATCHDOG.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
