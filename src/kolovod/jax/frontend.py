"""JAX's arrays as the engine sees them: those on a GPU by a copy in host memory."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kolovod import _native
from kolovod.core.frontend import TensorView
from kolovod.errors import FrontEndArgumentError

DTYPES: dict[np.dtype[Any], int] = {
    jnp.dtype(name): code
    for name, code in (_native.DTYPES | _native.FURTHER_DTYPES).items()
    if not name.startswith("float8") or hasattr(jnp, name)
}
_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}


def is_near(device: Any) -> bool:
    """Return whether the engine reaches what is on ``device``."""
    return device.platform == "cpu"  # type: ignore[no-any-return]


class _Views:
    """Keeps an array's memory where it is: while there is a view, JAX neither frees nor donates it.

    A program to which the array is donated meanwhile works on a copy.
    """

    def hold(self, tensor: jax.Array) -> object:
        """Return an object that keeps the memory of ``tensor`` while it lives."""
        try:
            return memoryview(tensor)
        except (BufferError, RuntimeError):  # bfloat16 and the like
            return np.asarray(tensor)

    def place_of(self, tensor: jax.Array) -> int:
        """Return 0: nothing is written in place."""
        return 0

    def has_moved(self, tensor: jax.Array, place: int) -> bool:
        """Return False: nothing is written in place."""
        return False


class JaxFrontend:
    """Concrete arrays on one device; what is being traced has no values yet."""

    holder = _Views()
    framework = ""

    def is_tensor(self, value: object) -> bool:
        """Return whether ``value`` is an array with values."""
        return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)

    def view(self, tensor: jax.Array) -> TensorView:
        """Describe ``tensor`` for the engine, as Frontend.view says, once it has its values."""
        if isinstance(tensor, jax.core.Tracer):
            raise FrontEndArgumentError(
                "inside jax.jit (and grad, vmap, scan, ...) verbs that end in _async do not work, "
                "nor are they needed: operations there do not wait for each other anyway"
            )
        if not isinstance(tensor, jax.Array):
            raise FrontEndArgumentError(
                f"need a jax.Array, not {type(tensor).__name__}; make one with jax.numpy.asarray()"
            )
        code = DTYPES.get(tensor.dtype)
        if code is None:
            known = ", ".join(dtype.name for dtype in DTYPES)
            raise FrontEndArgumentError(
                f"{tensor.dtype.name} is not supported; convert with .astype() to one of {known}"
            )
        devices = tensor.devices()
        if len(devices) != 1:
            names = ", ".join(sorted(map(str, devices)))
            raise FrontEndArgumentError(
                f"the array of shape {tensor.shape} is on several devices ({names}), and a verb "
                "takes one of each rank: jax.device_put(array, jax.local_devices()[0]) gathers it, "
                "array.addressable_shards has its parts"
            )
        if is_near(*devices):
            return code, tensor.shape, _address(tensor), tensor
        owner = jax.device_put(np.array(tensor), _host())  # a private copy, which gets the result
        return code, tensor.shape, _address(owner), owner

    host_view = view

    def empty_like(self, tensor: jax.Array) -> tuple[jax.Array, int]:
        """Return a new array, which nobody sees before its values are written, and its address."""
        # Functions of jax.numpy are compiled for each shape.
        (device,) = tensor.devices()
        values = np.empty(tensor.shape, tensor.dtype)
        output = jax.device_put(values, device if is_near(device) else _host())
        return output, _address(output)

    def claim(self, tensor: jax.Array) -> NoReturn:
        """Refuse: JAX relies on arrays that never change."""
        raise FrontEndArgumentError(
            f"a {type(tensor).__name__} cannot be changed in place; use the verb without '_'"
        )

    def copy_back(self, dense: jax.Array, tensor: jax.Array) -> NoReturn:
        """Raise InvalidArgumentError, as ``claim`` does."""
        self.claim(tensor)

    def placed(self, dense: jax.Array, like: jax.Array) -> jax.Array:
        """Return ``dense`` on the device of ``like``."""
        (device,) = like.devices()
        return dense if is_near(device) else jax.device_put(dense, like.sharding)

    def from_bytes(
        self, data: npt.NDArray[np.uint8], dtype: int, shape: tuple[int, ...], like: Any = None
    ) -> jax.Array:
        """Return an array with the values in ``data``; JAX copies them where it has to."""
        values = data.view(_BY_CODE[dtype]).reshape(shape)
        return jax.device_put(values, _host())


def _host() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]


def _address(array: jax.Array) -> int:
    address: int = array.block_until_ready().unsafe_buffer_pointer()
    return address
