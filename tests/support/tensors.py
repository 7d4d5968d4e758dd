"""How the conformance table makes and reads the tensors of each framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class Tensors(ABC):
    """The tensors of one framework."""

    layouts: tuple[bool, ...] = (True,)
    """Whether there are dense ones, and others."""

    @abstractmethod
    def make(self, values: np.ndarray, dtype: str, dense: bool = True) -> Any:
        """One with these values."""

    @abstractmethod
    def read(self, tensor: Any) -> np.ndarray:
        """Its values, in float64 where NumPy lacks the dtype."""

    def name(self, tensor: Any) -> str:
        """Its dtype."""
        return str(np.dtype(tensor.dtype))

    def writable(self, tensor: Any) -> Any:
        """The same for a verb in place, if tensors themselves cannot be written."""
        return tensor


class NumpyTensors(Tensors):
    """NumPy's arrays."""

    layouts = (True, False)

    def make(self, values: np.ndarray, dtype: str, dense: bool = True) -> Any:
        """An array of ``values``; not dense on request."""
        array = np.array(values, dtype=dtype)
        if dense or array.ndim == 0:
            return array
        spread = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), dtype)
        view = spread[..., ::2]
        view[...] = array
        return view

    def read(self, tensor: Any) -> np.ndarray:
        """Its values."""
        assert type(tensor) is np.ndarray
        return tensor


class TorchTensors(Tensors):
    """PyTorch's tensors."""

    layouts = (True, False)

    def make(self, values: np.ndarray, dtype: str, dense: bool = True) -> Any:
        """A tensor of ``values``; not dense on request."""
        import torch

        tensor = torch.from_numpy(np.array(values, np.float64)).to(getattr(torch, dtype))
        if dense or tensor.ndim == 0:
            return tensor
        return torch.stack([tensor, tensor], dim=-1)[..., 0]

    def read(self, tensor: Any) -> np.ndarray:
        """Its values, in float64 where NumPy lacks the dtype."""
        import torch

        return (tensor.double() if tensor.dtype is torch.bfloat16 else tensor).numpy()

    def name(self, tensor: Any) -> str:
        """Its dtype."""
        return str(tensor.dtype).removeprefix("torch.")


class TensorflowTensors(Tensors):
    """TensorFlow's eager tensors, and its variables for verbs in place."""

    def make(self, values: np.ndarray, dtype: str, dense: bool = True) -> Any:
        """A tensor of ``values``."""
        import tensorflow as tf

        return tf.cast(tf.constant(np.array(values, np.float64)), dtype)

    def read(self, tensor: Any) -> np.ndarray:
        """Its values, in float64 where NumPy lacks the dtype."""
        array = tensor.numpy()
        return array.astype(np.float64) if tensor.dtype.name == "bfloat16" else array

    def name(self, tensor: Any) -> str:
        """Its dtype."""
        return tensor.dtype.name

    def writable(self, tensor: Any) -> Any:
        """A variable."""
        import tensorflow as tf

        return tf.Variable(tensor)


class JaxTensors(Tensors):
    """JAX's arrays, which cannot be written at all."""

    def make(self, values: np.ndarray, dtype: str, dense: bool = True) -> Any:
        """An array of ``values``."""
        import jax

        return jax.device_put(values.astype(jax.numpy.dtype(dtype)))

    def read(self, tensor: Any) -> np.ndarray:
        """Its values, in float64 where NumPy lacks the dtype."""
        array = np.asarray(tensor)
        return array.astype(np.float64) if array.dtype.name == "bfloat16" else array


class MxnetTensors(Tensors):
    """MXNet's classic arrays."""

    def make(self, values: np.ndarray, dtype: str, dense: bool = True) -> Any:
        """An array of ``values``."""
        import mxnet

        return mxnet.nd.array(values, dtype=dtype)

    def read(self, tensor: Any) -> np.ndarray:
        """Its values."""
        import mxnet

        assert type(tensor) is mxnet.nd.NDArray
        return tensor.asnumpy()


class MxnetNumpyTensors(Tensors):
    """MXNet's arrays that are like NumPy's."""

    def make(self, values: np.ndarray, dtype: str, dense: bool = True) -> Any:
        """An array of ``values``."""
        import mxnet

        return mxnet.np.array(values, dtype=dtype)

    def read(self, tensor: Any) -> np.ndarray:
        """Its values."""
        import mxnet

        assert type(tensor) is mxnet.np.ndarray
        return tensor.asnumpy()


TENSORS: dict[str, Tensors] = {
    "numpy": NumpyTensors(),
    "torch": TorchTensors(),
    "tensorflow": TensorflowTensors(),
    "jax": JaxTensors(),
    "mxnet": MxnetTensors(),
    "mxnet-np": MxnetNumpyTensors(),
}
"""By front end: what comes before a "-" is its module's name."""
