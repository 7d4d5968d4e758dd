"""Memory of tensors that stays where it is while an asynchronous operation uses it.

A script may give a tensor other memory meanwhile (``.data =``, ``set_``): then what it had must
live on, so its storage is referenced. It may also have the storage resized, which frees the memory
at once, whoever refers to it; PyTorch refuses that of a storage that is not *resizable*, a mark
that it sets itself where memory is shared with NumPy. So storages in use carry it until they are
not. PyTorch has no call to take the mark off again, therefore it is written where it lies in a
storage, if that can be found out; else a script that resizes what is on its way is not stopped.

``share_memory_()``, and giving a tensor to another process, put other memory into the storage
itself, whatever its mark says: that is refused, too, by standing in for the two methods of a
storage that do it.

One thing goes unseen: a NumPy array made of a tensor meanwhile, whose mark is taken off with ours.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from kolovod import _native
from kolovod.errors import FrontEndArgumentError

__all__ = ["has_moved", "hold", "is_whole", "place_of"]

_UNKNOWN = -1
_BYTES = 64  # of a storage, in which the mark is looked for
_byte = ctypes.c_uint8.from_address


def hold(tensor: torch.Tensor) -> object:
    """Return an object that keeps the memory of ``tensor`` while it lives."""
    _refuse_sharing()
    storage = tensor.untyped_storage()
    return _native.HeldStorage(storage, storage._cdata, _place_of_mark())


def place_of(tensor: torch.Tensor) -> int:
    """Return the address of its memory, in host memory or on a GPU."""
    return tensor.data_ptr()


def has_moved(tensor: torch.Tensor, place: int) -> bool:
    """Return whether ``tensor`` has other memory now than that at ``place``."""
    return tensor.numel() > 0 and tensor.data_ptr() != place


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether all elements are within the storage, which may have been resized."""
    if tensor.numel() == 0:
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = tensor.storage_offset() + sum((size - 1) * step for size, step in steps) + 1
    return count * tensor.element_size() <= tensor.untyped_storage().nbytes()


@functools.cache
def _refuse_sharing() -> None:
    for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
        share = getattr(torch.UntypedStorage, name, None)
        if share is not None:
            setattr(torch.UntypedStorage, name, _refusing(share))


def _refusing(share: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(share)
    def shared(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if _native.HeldStorage.is_in_use(storage._cdata) and not storage.is_shared():
            raise FrontEndArgumentError(
                f"a tensor of {storage.nbytes()} bytes is to be moved to shared memory "
                "(share_memory_(), or to another process) while an operation on it is on its way: "
                "do it before, or when wait() has returned"
            )
        return share(storage, *args, **kwargs)

    return shared


@functools.cache
def _place_of_mark() -> int:
    """Return the place of the mark in a storage, in bytes; -1: not found."""
    if not hasattr(torch.UntypedStorage, "resizable"):  # an older PyTorch
        return _UNKNOWN
    try:
        return _found_place()
    except (RuntimeError, TypeError, ValueError):  # a PyTorch without NumPy
        return _UNKNOWN


def _found_place() -> int:
    tensor = torch.empty(1, dtype=torch.float32, device="cpu")  # whatever a script's defaults are
    storage = tensor.untyped_storage()
    before = ctypes.string_at(storage._cdata, _BYTES)
    tensor.numpy()
    after = ctypes.string_at(storage._cdata, _BYTES)
    changed = [i for i in range(_BYTES) if before[i] != after[i]]
    if len(changed) != 1 or (before[changed[0]], after[changed[0]]) != (1, 0):
        return _UNKNOWN
    (place,) = changed
    other = torch.empty(1, dtype=torch.float32, device="cpu").untyped_storage()
    said = []
    for value in (0, 1):
        _byte(other._cdata + place).value = value
        said.append(other.resizable())
    return place if said == [False, True] else _UNKNOWN
