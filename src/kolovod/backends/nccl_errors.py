"""NCCL's errors of its connections, read while an operation is on its way.

A link that fails without a rank's death (InfiniBand, a switch) leaves an operation waiting for
ever: NCCL notes an asynchronous error, which somebody has to ask for. PyTorch's watchdog would, and
would end the process; so the carrier asks (``nccl``).
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["AsyncErrors"]

_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t


class AsyncErrors:
    """The asynchronous errors of one communicator."""

    def __init__(self, communicator: int, library: ctypes.CDLL) -> None:
        """``communicator``: an ncclComm_t; ``library``: the NCCL that has made it.

        Raises AttributeError if the library cannot tell.
        """
        self._communicator = ctypes.c_void_p(communicator)
        self._ask: Any = library.ncclCommGetAsyncError
        self._ask.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        self._ask.restype = ctypes.c_int
        self._name: Any = library.ncclGetErrorString
        self._name.argtypes, self._name.restype = [ctypes.c_int], ctypes.c_char_p

    def found(self) -> str:
        """Return what is wrong, in NCCL's words; "" if nothing is."""
        error = ctypes.c_int(_SUCCESS)
        asked: int = self._ask(self._communicator, ctypes.byref(error))
        result = asked if asked != _SUCCESS else error.value
        if result in (_SUCCESS, _IN_PROGRESS):
            return ""
        name: bytes = self._name(result)
        return f"{name.decode(errors='replace')} (ncclResult_t {result})"


def of_group(group: Any) -> AsyncErrors | None:
    """Return a connected ProcessGroupNCCL's errors; None if PyTorch or NCCL cannot tell."""
    try:
        communicator = group._comm_ptr()
        # PyTorch has loaded it, so this is that one, whatever else is installed.
        return AsyncErrors(communicator, ctypes.CDLL("libnccl.so.2")) if communicator else None
    except (AttributeError, OSError, RuntimeError):
        return None
