"""MXNet's arrays in host memory, as the engine sees them.

MXNet computes in threads of its own and orders what it does by the arrays it reads and writes. The
engine's accesses are outside of that order, so each waits for what MXNet has been told before: an
input until it is written, an output until nobody reads or writes it. What MXNet is told after a
verb has returned (or a handle's ``wait``) sees the result.
"""

from __future__ import annotations

import ctypes
from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt
from mxnet.base import _LIB, check_call

from kolovod import _native
from kolovod.core.frontend import TensorView
from kolovod.errors import FrontEndArgumentError

NAMES = ("float32", "float64", "float16", "uint8", "int8", "int32", "int64", "bool")
"""The dtypes that MXNet's arrays and the engine both have."""

# Classic arrays answer with NumPy's classes, those of mx.np with its dtypes.
DTYPES: dict[Any, int] = {
    key: _native.DTYPES[name] for name in NAMES for key in (np.dtype(name), np.dtype(name).type)
}
_BY_CODE = {code: np.dtype(dtype) for dtype, code in DTYPES.items()}
_CLASSIC, _NUMPY_LIKE = mx.nd.NDArray, mx.np.ndarray


class MxnetFrontend:
    """``mx.nd.NDArray`` and ``mx.np.ndarray``; they are always dense."""

    holder = None
    framework = ""

    def is_tensor(self, value: object) -> bool:
        """Return whether ``value`` is an array that is not sparse."""
        return isinstance(value, _CLASSIC) and value.stype == "default"

    def view(self, tensor: mx.nd.NDArray) -> TensorView:
        """Describe ``tensor`` for the engine (Frontend.view), once MXNet has written the values."""
        code = check(tensor)
        tensor.wait_to_read()
        return code, tensor.shape, _address(tensor), tensor

    host_view = view

    def empty_like(self, tensor: mx.nd.NDArray) -> tuple[mx.nd.NDArray, int]:
        """Return an uninitialised array like ``tensor``, of its kind too, and its address."""
        make = mx.np.empty if isinstance(tensor, _NUMPY_LIKE) else mx.nd.empty
        output = make(tensor.shape, dtype=tensor.dtype, ctx=tensor.context)
        return output, _address(output)

    def claim(self, tensor: mx.nd.NDArray) -> None:
        """Wait until MXNet has done all that it was told to do with ``tensor``."""
        check(tensor)
        check_call(_LIB.MXNDArrayWaitToWrite(tensor.handle))

    def copy_back(self, dense: mx.nd.NDArray, tensor: mx.nd.NDArray) -> None:
        """Write the values of ``dense`` into ``tensor``, of which it is a copy."""
        dense.copyto(tensor)

    def placed(self, dense: mx.nd.NDArray, like: mx.nd.NDArray) -> mx.nd.NDArray:
        """Return ``dense`` as it is: all arrays are in host memory."""
        return dense

    def from_bytes(
        self, data: npt.NDArray[np.uint8], dtype: int, shape: tuple[int, ...], like: Any = None
    ) -> mx.nd.NDArray:
        """An array of the kind of ``like``, else a classic one, with a copy of ``data``.

        MXNet could take the memory itself, but would give it back from a thread of its own, which
        it may do after Python has ended.
        """
        array = mx.nd.empty(shape, dtype=_BY_CODE[dtype])
        if data.nbytes:
            ctypes.memmove(_address(array), data.ctypes.data, data.nbytes)
        return array.as_np_ndarray() if isinstance(like, mx.np.ndarray) else array


def check(tensor: Any) -> int:
    """The engine's number of the dtype. Raises InvalidArgumentError for what it cannot reach."""
    if not isinstance(tensor, _CLASSIC):
        raise FrontEndArgumentError(
            f"need an MXNet array, not {type(tensor).__name__}; make one with mx.nd.array() or "
            "mx.np.array()"
        )
    if tensor.stype != "default":
        raise FrontEndArgumentError(
            f"the array of shape {tensor.shape} is sparse ({tensor.stype}): use "
            ".tostype('default') (a Parameter has sparse gradients only with grad_stype, an "
            "Embedding with sparse_grad=True)"
        )
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise FrontEndArgumentError(
            f"dtype {np.dtype(tensor.dtype).name} is not supported; convert with .astype() to one "
            f"of {', '.join(NAMES)}"
        )
    if not tensor.context.device_type.startswith("cpu"):
        raise FrontEndArgumentError(
            f"the array of shape {tensor.shape} is on {tensor.context}, but this engine works in "
            "host memory: pass .as_in_context(mx.cpu())"
        )
    return code


def _address(tensor: mx.nd.NDArray) -> int:
    """Return the address of the first byte, in the order of the indices.

    MXNet undoes oneDNN's own layouts for that.
    """
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(tensor.handle, ctypes.byref(pointer)))
    return pointer.value or 0
