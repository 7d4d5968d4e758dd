"""Memory of tensors that stays where it is while an asynchronous operation uses it.

A script may give a tensor other memory meanwhile (``.data =``, ``set_``): then what it had must
live on, so its storage is referenced. It may also have the storage resized, which frees the memory
at once, whoever refers to it; PyTorch refuses that of a storage that is not *resizable*, a mark
that it sets itself where memory is shared with NumPy. So storages in use carry it until they are
not. PyTorch has no call to take the mark off again, therefore it is written where it lies in a
storage, if that can be found out; else a script that resizes what is on its way is not stopped.

Two things go unseen: ``share_memory_()``, which puts other memory into the storage itself; and a
NumPy array made of a tensor meanwhile, whose mark is taken off with ours.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import ClassVar

import torch

__all__ = ["has_moved", "hold", "is_whole", "place_of"]

_BYTES = 64  # of a storage, in which the mark is looked for
_byte = ctypes.c_uint8.from_address


def hold(tensor: torch.Tensor) -> object:
    """What keeps the memory of ``tensor`` while it lives."""
    storage = tensor.untyped_storage()
    place = _place_of_mark()
    return storage if place is None else _Held(storage, place)


def place_of(tensor: torch.Tensor) -> int:
    """Where its memory is, in host memory or on a GPU."""
    return tensor.data_ptr()


def has_moved(tensor: torch.Tensor, place: int) -> bool:
    """Whether ``tensor`` has other memory now than that at ``place``."""
    return tensor.numel() > 0 and tensor.data_ptr() != place


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether all elements are within the storage, which may have been resized."""
    if tensor.numel() == 0:
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = tensor.storage_offset() + sum((size - 1) * step for size, step in steps) + 1
    return count * tensor.element_size() <= tensor.untyped_storage().nbytes()


class _Held:
    """A storage that the script cannot have resized as long as this object lives."""

    __slots__ = ("_key", "_mark", "_storage")

    _lock: ClassVar = threading.RLock()  # a collection of garbage may drop another one within
    _users: ClassVar[dict[int, int]] = {}
    """How many operations use each storage that is marked for them, by its address."""

    def __init__(self, storage: torch.UntypedStorage, place: int) -> None:
        self._storage = storage
        self._key: int = storage._cdata
        self._mark = _byte(self._key + place)
        with self._lock:
            users = self._users.get(self._key, 0)
            if users == 0 and not storage.resizable():
                self._key = 0  # for a reason of its own
                return
            self._users[self._key] = users + 1
            self._mark.value = 0

    def __del__(self) -> None:
        if self._key == 0:
            return
        with self._lock:
            left = self._users.pop(self._key) - 1
            if left:
                self._users[self._key] = left
            else:
                self._mark.value = 1


@functools.cache
def _place_of_mark() -> int | None:
    """Where in a storage its mark lies, in bytes; None: not found."""
    if not hasattr(torch.UntypedStorage, "resizable"):  # an older PyTorch
        return None
    try:
        return _found_place()
    except (RuntimeError, TypeError, ValueError):  # a PyTorch without NumPy
        return None


def _found_place() -> int | None:
    tensor = torch.empty(1, dtype=torch.float32, device="cpu")  # whatever a script's defaults are
    storage = tensor.untyped_storage()
    before = ctypes.string_at(storage._cdata, _BYTES)
    tensor.numpy()
    after = ctypes.string_at(storage._cdata, _BYTES)
    changed = [i for i in range(_BYTES) if before[i] != after[i]]
    if len(changed) != 1 or (before[changed[0]], after[changed[0]]) != (1, 0):
        return None
    (place,) = changed
    other = torch.empty(1, dtype=torch.float32, device="cpu").untyped_storage()
    said = []
    for value in (0, 1):
        _byte(other._cdata + place).value = value
        said.append(other.resizable())
    return place if said == [False, True] else None
