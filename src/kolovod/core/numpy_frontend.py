"""NumPy arrays (and Python's own numbers) as the engine sees them."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kolovod import _native
from kolovod.core.frontend import TensorView
from kolovod.errors import InvalidArgumentError

Array: TypeAlias = npt.NDArray[Any]

_addressof = ctypes.addressof
_from_buffer = ctypes.c_char.from_buffer
_NUMBERS = (np.generic, bool, int, float, complex)

# Some have no dtype in NumPy itself; ml_dtypes registers those, which are found when first used.
_ALL = _native.DTYPES | _native.FURTHER_DTYPES
_DTYPES: dict[np.dtype[Any], int] = {
    np.dtype(name): code
    for name, code in _ALL.items()
    if name != "bfloat16" and not name.startswith("float8")
}


_BY_CODE = {code: dtype for dtype, code in _DTYPES.items()}


def let_engine_read() -> bool:
    """Have the engine's short verbs read arrays where they lie; return whether they can.

    What it finds of these samples in memory must be right.
    """
    dtypes = {dtype: code for dtype, code in _DTYPES.items() if code in _native.DTYPES.values()}
    plain, readonly = np.zeros((2, 3), np.float32), np.arange(5)
    readonly.flags.writeable = False
    samples: list[tuple[Array, bool, bool]] = [(np.array(7, dtype), True, True) for dtype in dtypes]
    samples += [(plain, True, True), (plain[1:], True, True), (plain[0, 0:0], True, True)]
    samples += [(readonly, True, False), (plain.T, False, False), (plain[:, 1:], False, False)]
    samples += [
        (plain.astype(">f4"), False, False),
        (np.zeros(9, "i1")[1:].view("i8"), False, False),
    ]
    facts = [
        (array, dtypes.get(array.dtype, 0), array.shape, array.ctypes.data, taken, written)
        for array, taken, written in samples
    ]
    return _native.use_numpy(np.ndarray, dtypes, np.empty, facts)


def _ml_dtype(code: int) -> np.dtype[Any]:
    """Return the dtype of a number that only ml_dtypes has, an array of which was seen before."""
    for dtype, known in _DTYPES.items():
        if known == code:
            return dtype
    raise InvalidArgumentError(f"dtype number {code} has no NumPy dtype here")


def _address(array: Array) -> int:
    try:
        return _addressof(_from_buffer(array))  # type: ignore[arg-type]  # four times faster than array.ctypes.data
    except (TypeError, ValueError):  # read-only, empty, or without a buffer format (bfloat16)
        address: int = array.__array_interface__["data"][0]
        return address


def _code(dtype: np.dtype[Any]) -> int:
    if dtype.name in _ALL and dtype.isnative:
        return _DTYPES.setdefault(dtype, _ALL[dtype.name])
    known = ", ".join(_ALL)
    raise InvalidArgumentError(
        f"dtype {dtype.str if not dtype.isnative else dtype.name} is not supported; "
        f"convert with .astype() to one of {known} (native byte order)"
    )


class _Referenced:
    """Keeps an array's memory where it is: NumPy resizes no array with a weak reference to it.

    ``resize(refcheck=False)`` asks for none but these, and frees what the array had.
    """

    def hold(self, tensor: Array) -> object:
        """Implement ``Holder.hold``."""
        return weakref.ref(tensor) if isinstance(tensor, np.ndarray) else None

    def place_of(self, tensor: Array) -> int:
        """Implement ``Holder.place_of``: nothing moves."""
        return 0

    def has_moved(self, tensor: Array, place: int) -> bool:
        """Implement ``Holder.has_moved``."""
        return False


class NumpyFrontend:
    """Arrays, and as input also NumPy scalars and Python's numbers, which act as 0-d arrays."""

    holder = _Referenced()
    framework = "numpy"

    def is_tensor(self, value: object) -> bool:
        """Return whether ``value`` is an array or a number."""
        return isinstance(value, (np.ndarray, *_NUMBERS))

    def view(self, tensor: Array) -> TensorView:
        """Implement ``Frontend.view``.

        Python's int becomes int64, float float64, complex complex128.
        """
        if type(tensor) is not np.ndarray:
            if isinstance(tensor, _NUMBERS):
                tensor = np.array(tensor)
                dtype = tensor.dtype
                code = _DTYPES[dtype] if dtype in _DTYPES else _code(dtype)
                return code, (), _address(tensor), tensor
            if isinstance(tensor, np.ma.MaskedArray) or not isinstance(tensor, np.ndarray):
                raise InvalidArgumentError(
                    f"need a NumPy array or a number, not {type(tensor).__name__}; "
                    "convert it with numpy.asarray(), or a mask with .filled()"
                )
        dtype = tensor.dtype
        code = _DTYPES.get(dtype)
        if code is None:
            code = _code(dtype)
        if not tensor.flags.c_contiguous:
            tensor = np.array(tensor, order="C")
        return code, tensor.shape, _address(tensor), tensor

    host_view = view

    def empty_like(self, tensor: Array) -> tuple[Array, int]:
        """Implement ``Frontend.empty_like``."""
        array: Array = np.empty(tensor.shape, tensor.dtype)
        return array, _address(array)

    def claim(self, tensor: Array) -> None:
        """Refuse what cannot be written."""
        if not isinstance(tensor, np.ndarray):
            raise InvalidArgumentError(
                f"a {type(tensor).__name__} cannot be changed in place; use the verb without '_'"
            )
        if not tensor.flags.writeable:
            raise InvalidArgumentError(
                f"the array of shape {tensor.shape} is read-only; use the verb without '_', or "
                "a copy"
            )

    def copy_back(self, dense: Array, tensor: Array) -> None:
        """Implement ``Frontend.copy_back``."""
        tensor[...] = dense

    def placed(self, dense: Array, like: Array) -> Array:
        """Implement ``Frontend.placed``: all arrays are in host memory."""
        return dense

    def from_bytes(
        self,
        data: npt.NDArray[np.uint8],
        dtype: int,
        shape: tuple[int, ...],
        like: Array | None = None,
    ) -> Array:
        """Implement ``Frontend.from_bytes``."""
        array = data.view(_BY_CODE[dtype] if dtype in _BY_CODE else _ml_dtype(dtype))
        return array if len(shape) == 1 else array.reshape(shape)
