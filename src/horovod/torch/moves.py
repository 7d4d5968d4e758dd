"""Horovod's allgather, broadcast and alltoall, and their asynchronous forms."""

from __future__ import annotations

from typing import Any

import torch

from horovod.common.arguments import named
from horovod.common.process_sets import global_process_set, group_of
from horovod.torch import handles
from horovod.torch.arguments import Tensor, Tensors, several
from horovod.torch.autograd import plain, verbs
from kolovod.errors import FrontEndArgumentError


def allgather(
    tensor: Tensor, name: str | None = None, process_set: Any = global_process_set
) -> Tensor:
    """The ranks' tensors one after the other; has a gradient."""
    return verbs.allgather(tensor, named("allgather", name), group_of(process_set))


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: Any = global_process_set
) -> int:
    """``allgather`` that returns a handle at once."""
    arguments = named("allgather", name), group_of(process_set)
    return handles.number_of(plain.allgather_async(tensor, *arguments))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: Any = global_process_set
) -> list[Tensor]:
    """``allgather`` of several tensors as one operation."""
    arguments = named("grouped_allgather", name), group_of(process_set)
    return verbs.grouped_allgather(several(tensors), *arguments)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: Any = global_process_set
) -> int:
    """``grouped_allgather`` that returns a handle at once."""
    arguments = named("grouped_allgather", name), group_of(process_set)
    return handles.number_of(plain.grouped_allgather_async(several(tensors), *arguments), tuple)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Tensor:
    """``root_rank``'s values as a new tensor; has a gradient. ``root_rank`` is one of the world."""
    return verbs.broadcast(tensor, root_rank, named("broadcast", name), group_of(process_set))


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> int:
    """``broadcast`` that returns a handle at once."""
    arguments = root_rank, named("broadcast", name), group_of(process_set)
    return handles.number_of(plain.broadcast_async(tensor, *arguments))


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Tensor:
    """``broadcast`` in place."""
    return plain.broadcast_(tensor, root_rank, named("broadcast", name), group_of(process_set))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> int:
    """``broadcast_`` that returns a handle at once."""
    arguments = root_rank, named("broadcast", name), group_of(process_set)
    return handles.number_of(plain.broadcast_async_(tensor, *arguments))


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Send rows to every rank, and receive rows from every rank; has a gradient.

    Returns the tensor, and with ``splits`` also how many rows each rank sent (int32), on a GPU if
    ``splits`` is there.
    """
    arguments = _splits(splits), named("alltoall", name), group_of(process_set)
    result, received = verbs.alltoall(tensor, *arguments)
    if splits is None:
        return result
    return result, torch.tensor(received, dtype=torch.int32, device=_device_of(splits))


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> int:
    """``alltoall`` that returns a handle at once; its result is always the pair."""
    arguments = _splits(splits), named("alltoall", name), group_of(process_set)

    device = _device_of(splits)

    def finish(result: tuple[Tensor, list[int]]) -> tuple[Tensor, Tensor]:
        return result[0], torch.tensor(result[1], dtype=torch.int32, device=device)

    return handles.number_of(plain.alltoall_async(tensor, *arguments), finish)


def _device_of(splits: Any) -> torch.device:
    return splits.device if isinstance(splits, torch.Tensor) else torch.device("cpu")


def _splits(splits: Any) -> Any:
    """A list where ``splits`` is a tensor. Raises ValueError for no whole numbers."""
    if isinstance(splits, torch.Tensor):
        if splits.ndim != 1 or splits.dtype.is_floating_point:
            raise FrontEndArgumentError(
                f"splits has shape {tuple(splits.shape)} and dtype {splits.dtype}: give one whole "
                "number of rows for each rank"
            )
        return splits.tolist()
    return splits
