"""Tensors as flat ranges of elements, which is how c10d's collectives see them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kolovod import _native
from kolovod.c10d import staging
from kolovod.c10d.order import is_in_memory
from kolovod.core.submission import EngineTensor
from kolovod.errors import GroupArgumentError
from kolovod.torch import held
from kolovod.torch.frontend import DTYPES, code_of

__all__ = ["Flat", "joined", "spread"]

_BYTE = _native.DTYPES["uint8"]


class Flat:
    """``count`` elements of dtype ``code`` and ``itemsize`` bytes at ``address``, in ``dense``.

    ``dense`` is the tensor itself, or a dense copy of it, of what is on a GPU in host memory.
    Raises InvalidArgumentError for what the engine cannot reach.
    """

    __slots__ = ("_memory", "address", "bytes", "code", "count", "dense", "itemsize", "tensor")

    def __init__(
        self, tensor: torch.Tensor, *, moves_only: bool = False, is_read: bool = True
    ) -> None:
        """``moves_only``: there is no arithmetic, so every dtype will do, as bytes.

        ``is_read``: False where the operation only writes it, so that nothing of it is copied.
        """
        self.tensor = tensor
        if moves_only and tensor.dtype not in DTYPES and is_in_memory(tensor):
            self.dense = _dense(tensor, is_read)
            self.code, self.address = _BYTE, self.dense.data_ptr()
            self.count, self.itemsize = tensor.numel() * tensor.element_size(), 1
        else:
            if is_read or not staging.is_on_device(tensor):
                self.code, _, self.address, self.dense = staging.frontend.host_view(tensor)
            else:
                self.dense = _dense(tensor, is_read)
                self.code, self.address = code_of(tensor), self.dense.data_ptr()
            self.count, self.itemsize = self.dense.numel(), self.dense.element_size()
        self.bytes = self.count * self.itemsize
        # The tensor may be given other memory while an operation goes on.
        self._memory = self.dense.untyped_storage()

    @staticmethod
    def count_of(tensor: torch.Tensor) -> int:
        """Return the number of elements of a tensor that is only moved, without looking at them.

        They are bytes for dtypes that the engine does not know.
        """
        return tensor.numel() * (1 if tensor.dtype in DTYPES else tensor.element_size())

    def entry(self, target: int) -> EngineTensor:
        """Return the tensor for the engine, with the results at ``target``."""
        return self.code, (self.count,), self.address, target

    def stay_apart(self, output: Flat, place: int | None = None) -> None:
        """Make a copy if this input overlaps ``output``, unless it begins at its byte ``place``."""
        begin, end = output.address, output.address + output.bytes
        if self.address >= end or (place is not None and self.address == begin + place):
            return
        if self.address + self.bytes > begin:
            self.dense = self.dense.detach().clone()
            self.address = self.dense.data_ptr()
            self._memory = self.dense.untyped_storage()

    def copy_back(self) -> None:
        """Bring the results from the dense copy, if there is one, to the tensor."""
        if staging.is_on_device(self.tensor):
            device = staging.device()
            device.used_here(self.tensor)  # it may have been made on another stream
            device.unpack(self.dense.view(-1), [self.tensor])
        elif self.dense is not self.tensor:
            if not held.is_whole(self.tensor):
                raise GroupArgumentError(
                    f"the storage of the tensor of shape {tuple(self.tensor.shape)} was resized "
                    "while a collective was on its way, so that the result has no place: leave it "
                    "alone until wait() has returned"
                )
            with torch.no_grad():
                self.tensor.copy_(self.dense)


def _dense(tensor: torch.Tensor, is_read: bool) -> torch.Tensor:
    """The tensor itself, or dense host memory in its place, with its values if it is read."""
    if staging.is_on_device(tensor):
        if is_read:
            return staging.device().to_host(tensor)
        return staging.device().pinned(tensor.numel(), tensor.dtype).view(tensor.shape)
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new tensor of one dimension with the elements of all."""
    with torch.no_grad():
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def spread(
    what: str,
    data: npt.NDArray[np.uint8],
    counts: Sequence[int],
    source: Flat,
    outputs: Sequence[torch.Tensor],
) -> None:
    """Copy ``counts[r]`` elements like ``source``'s from ``data`` into ``outputs[r]``, in turn.

    Raises InvalidArgumentError if the outputs are not just as large and of the same dtype.
    """
    if len(counts) != len(outputs):
        raise GroupArgumentError(f"{what}: {len(outputs)} output tensors for {len(counts)} ranks")
    whole = torch.from_numpy(data)
    begin = 0
    with torch.no_grad():
        for rank, (count, output) in enumerate(zip(counts, outputs, strict=True)):
            end = begin + count * source.itemsize
            received = whole[begin:end].view(source.tensor.dtype)
            if received.numel() != output.numel() or received.dtype != output.dtype:
                raise GroupArgumentError(
                    f"{what}: rank {rank} sent {received.numel()} elements of {received.dtype}, "
                    f"but their output has the shape {tuple(output.shape)} and {output.dtype}"
                )
            output.copy_(received.view(output.shape))
            begin = end
