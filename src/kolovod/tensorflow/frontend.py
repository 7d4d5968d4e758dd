"""TensorFlow's eager tensors and variables as the engine sees them.

It sees those on a GPU by a copy in host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from kolovod import _native
from kolovod.core.frontend import TensorView
from kolovod.errors import FrontEndArgumentError

DTYPES: dict[tf.DType, int] = {
    tf.as_dtype(name): code
    for name, code in (_native.DTYPES | _native.FURTHER_DTYPES).items()
    if not name.startswith("float8")
}
_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}


def is_near(device: str) -> bool:
    """Return whether the engine reaches what is on ``device``; "": nobody has said where it is."""
    return ":CPU:" in device or not device


class TensorflowFrontend:
    """Takes eager tensors; as input, and for work in place, variables as well."""

    holder = None
    framework = ""

    def is_tensor(self, value: object) -> bool:
        """Return whether ``value`` is an eager tensor or a variable."""
        return isinstance(value, tf.Variable) or (
            isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value)
        )

    def view(self, tensor: tf.Tensor) -> TensorView:
        """Describe ``tensor`` for the engine; variables, and what is on a GPU, by a copy."""
        if not self.is_tensor(tensor):
            raise _not_a_tensor(tensor)
        owner = tensor.value() if isinstance(tensor, tf.Variable) else tensor
        code = code_of(owner.dtype)
        if owner is not tensor or not is_near(owner.device):
            with tf.device("CPU:0"):  # a private copy, which gets the result
                owner = tf.raw_ops.DeepCopy(x=owner)
        return code, tuple(owner.shape), _address(owner), owner

    host_view = view

    def empty_like(self, tensor: tf.Tensor) -> tuple[tf.Tensor, int]:
        """Return a new tensor, which nobody sees before its values are written, and its address."""
        with tf.device("CPU:0"):
            output = tf.raw_ops.Empty(shape=tensor.shape.as_list(), dtype=tensor.dtype)
        return output, _address(output)

    def claim(self, tensor: tf.Tensor) -> None:
        """Refuse what cannot be written."""
        if not isinstance(tensor, tf.Variable):
            raise FrontEndArgumentError(
                "only a tf.Variable can be changed in place, this is of type "
                f"{type(tensor).__name__}; use the verb without '_'"
            )

    def copy_back(self, dense: tf.Tensor, tensor: tf.Tensor) -> None:
        """Write the values of ``dense`` into the variable ``tensor``."""
        tensor.assign(dense)

    def placed(self, dense: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
        """Return ``dense`` on the device of ``like``."""
        if is_near(like.device):
            return dense
        with tf.device(like.device):
            return tf.identity(dense)

    def from_bytes(
        self, data: npt.NDArray[np.uint8], dtype: int, shape: tuple[int, ...], like: Any = None
    ) -> tf.Tensor:
        """Return a tensor with the values in ``data``; TensorFlow copies them where it has to."""
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(
                data.view(_BY_CODE[dtype].as_numpy_dtype).reshape(shape), _BY_CODE[dtype]
            )


def code_of(dtype: tf.DType) -> int:
    """The engine's number for ``dtype``. Raises InvalidArgumentError for what it does not know."""
    code = DTYPES.get(dtype)
    if code is None:
        known = ", ".join(known.name for known in DTYPES)
        raise FrontEndArgumentError(f"{dtype.name} is not supported; tf.cast to one of {known}")
    return code


def _address(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.bfloat16:  # which the buffer protocol does not know
        tensor = tf.bitcast(tensor, tf.uint16)  # the same memory
    address: int = np.asarray(memoryview(tensor)).__array_interface__["data"][0]
    return address


def _not_a_tensor(value: object) -> FrontEndArgumentError:
    return FrontEndArgumentError(
        f"need an eager tf.Tensor or a tf.Variable, not {type(value).__name__}; make one with "
        "tf.convert_to_tensor()"
    )
