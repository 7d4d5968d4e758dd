"""PyTorch's tensors as the engine sees them.

It sees those on a GPU by a copy in host memory, except where it takes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version

from kolovod import _native
from kolovod.core.frontend import DEVICE_SHIFT, ON_DEVICE, TensorView, plain_dtype
from kolovod.core.world import takes_gpus
from kolovod.errors import FrontEndArgumentError
from kolovod.private_apis.torch import is_in_transform
from kolovod.torch import held
from kolovod.torch.device import Cuda, cuda

# torch.uint16 came with PyTorch 2.3.
DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code
    for name, code in (_native.DTYPES | _native.FURTHER_DTYPES).items()
    if hasattr(torch, name)
}
BY_CODE = {code: dtype for dtype, code in DTYPES.items()}
AVERAGED = {
    dtype: code
    for dtype, code in DTYPES.items()
    if dtype.is_complex or code in _native.DTYPES.values()
}
"""The dtypes of gradients and parameters."""
_empty_like = torch.empty_like


class TorchFrontend:
    """Takes tensors of any device that has memory; it neither reads nor makes autograd history."""

    holder = held

    def __init__(self, device: Cuda = cuda, is_direct: Callable[[], bool] = takes_gpus) -> None:
        """``device``: copies to and from the GPU (tests have another).

        ``is_direct``: asked whether the engine itself takes tensors on GPUs.
        """
        self.device = device
        self.is_direct = is_direct
        self.framework = "torch" if device is cuda else ""  # another says what is in host memory

    def is_tensor(self, value: object) -> bool:
        """Return whether ``value`` is a tensor."""
        return isinstance(value, torch.Tensor)

    def view(self, tensor: torch.Tensor) -> TensorView:
        """Describe ``tensor`` for the engine, as Frontend.view says."""
        try:
            code = DTYPES[tensor.dtype]
            if tensor.is_cpu and is_plain_block(tensor):
                address = tensor.data_ptr()
                if address or not tensor.numel():
                    return code, tensor.shape, address, tensor
        except (AttributeError, KeyError, RuntimeError):
            pass  # explained below
        return self._slow_view(tensor)

    def host_view(self, tensor: torch.Tensor) -> TensorView:
        """Describe ``tensor`` for the engine, by a copy in host memory where it is on a GPU."""
        if isinstance(tensor, torch.Tensor) and self.device.is_on_device(tensor):
            return self._slow_view(tensor, is_direct=False)
        return self.view(tensor)

    def empty_like(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return an uninitialised dense tensor like ``tensor``, and its address."""
        output = _empty_like(tensor)
        return output, output.data_ptr()

    def claim(self, tensor: torch.Tensor) -> None:
        """Tell autograd that the values change, so that a backward that saved them complains."""
        if not isinstance(tensor, torch.Tensor):
            raise _not_a_tensor(tensor)
        if not tensor.is_inference():
            increment_version(tensor)

    def copy_back(self, dense: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write the values of ``dense`` into ``tensor``, of which it is a copy.

        Raises InvalidArgumentError where ``tensor`` has another shape by now, or cannot hold the
        values.
        """
        if dense.shape != tensor.shape:
            raise FrontEndArgumentError(
                f"the tensor of shape {tuple(dense.shape)} was given the shape "
                f"{tuple(tensor.shape)} while an operation on it was on its way: leave it alone "
                "until wait() has returned"
            )
        is_on_device = self.device.is_on_device
        if is_on_device(tensor) and not is_on_device(dense):
            self.device.unpack(dense.view(-1), [tensor])
            return
        one_for_several = tuple(slice(None, 1 if step == 0 else None) for step in tensor.stride())
        with torch.no_grad():
            if tensor.numel() and 0 in tensor.stride():
                kept = dense[one_for_several]
                if not torch.equal(kept.expand_as(dense), dense):
                    raise FrontEndArgumentError(
                        f"the tensor of shape {tuple(tensor.shape)} was made by expand(), so that "
                        "one element in memory stands for several, and cannot hold values that "
                        "differ: pass tensor.contiguous()"
                    )
                tensor, dense = tensor[one_for_several], kept
            tensor.copy_(dense)

    def placed(self, dense: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return ``dense`` on the device of ``like``.

        On a GPU it is there when the current stream has come to it.
        """
        is_on_device = self.device.is_on_device
        if is_on_device(like) and not is_on_device(dense):
            return self.device.to_device(dense, like)
        return dense

    def from_bytes(
        self, data: Any, dtype: int, shape: tuple[int, ...], like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return a tensor over ``data``.

        For ON_DEVICE ``data`` is a flat tensor on the GPU, or None for an empty one.
        """
        if dtype >= ON_DEVICE:
            if data is None:
                data = self.device.empty(dtype >> DEVICE_SHIFT)
            self.device.used_here(data)
            data, dtype = data.view(torch.uint8), plain_dtype(dtype)
        else:
            data = torch.from_numpy(data)
        return data.view(BY_CODE[dtype]).reshape(shape)  # type: ignore[no-any-return]

    def _slow_view(self, tensor: torch.Tensor, is_direct: bool | None = None) -> TensorView:
        """Make a dense copy, in host memory unless the view is direct; or say what is wrong."""
        if not isinstance(tensor, torch.Tensor):
            raise _not_a_tensor(tensor)
        refuse_transformed(tensor)
        refuse_nested(tensor, "the tensor")
        if tensor.layout is not torch.strided:
            hint = " (an embedding makes sparse gradients only with sparse=True)"
            hint = hint if tensor.layout is torch.sparse_coo else ""
            raise FrontEndArgumentError(
                f"the tensor of shape {tuple(tensor.shape)} is {tensor.layout}; use "
                f".to_dense(){hint}"
            )
        is_on_device = self.device.is_on_device(tensor)
        if not (tensor.is_cpu or is_on_device):
            raise FrontEndArgumentError(
                f"the tensor of shape {tuple(tensor.shape)} is on {tensor.device}, but this engine "
                "works in host memory and copies from CUDA devices only: pass tensor.cpu()"
            )
        if tensor.numel() and not tensor.data_ptr():
            raise FrontEndArgumentError(
                f"the {type(tensor).__name__} of shape {tuple(tensor.shape)} has no memory of its "
                "own: of a DTensor pass the part that this rank has, tensor.to_local()"
            )
        code = code_of(tensor)
        if is_on_device and (self.is_direct() if is_direct is None else is_direct):
            if is_plain_block(tensor):
                dense = tensor
            else:
                with torch.no_grad():
                    dense = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                    dense.copy_(tensor)
            self.device.submit(dense)
            code |= ON_DEVICE | (tensor.device.index or 0) << DEVICE_SHIFT
        elif is_on_device:
            dense = self.device.to_host(tensor)
        else:
            with torch.no_grad():
                dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        return code, dense.shape, dense.data_ptr(), dense


def let_engine_read() -> bool:
    """Have the engine's short verbs read tensors where they lie; return whether they can.

    They ask PyTorch itself (2.9 and later), and what it answers about these samples must be right.
    """
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        return False
    plain = torch.zeros((2, 3), dtype=torch.float32, device="cpu")
    samples = [(plain, True, True), (plain[1:], True, True), (plain[0, :0], True, True)]
    samples += [(plain.T, False, False), (plain[:, 1:], False, False)]
    samples += [(plain.clone().requires_grad_(), False, True), (plain[0, 0], True, True)]
    samples += [(torch.zeros(3, dtype=torch.complex64, device="cpu").conj().imag, False, False)]
    samples += [
        (torch.zeros(2, dtype=dtype, device="cpu"), is_known, is_known)
        for dtype, code in DTYPES.items()
        for is_known in [code in _native.DTYPES.values()]
    ]
    return _native.use_torch(
        (torch.Tensor, torch.nn.Parameter),
        exchange,
        _empty_like,
        TorchFrontend().claim,
        [
            (tensor, DTYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr(), taken, written)
            for tensor, taken, written in samples
        ],
    )


def refuse_transformed(tensor: torch.Tensor) -> None:
    """Raise InvalidArgumentError for one that stands for others, without values of its own."""
    if isinstance(tensor, torch.Tensor) and is_in_transform(tensor):
        raise FrontEndArgumentError(
            "a verb within torch.vmap, torch.func.grad or another transform of torch.func gets a "
            "tensor without values: call it outside, on the whole batch, or on the gradients that "
            "come out (kolovod.torch's verbs take part in backward() without torch.func)"
        )


def refuse_nested(tensor: torch.Tensor, what: str) -> None:
    """Raise InvalidArgumentError for one of torch.nested: other ranks may have other lengths."""
    if tensor.is_nested:
        raise FrontEndArgumentError(
            f"{what} is nested ({tensor.layout}), of {tensor.size(0)} parts that may have other "
            "lengths on other ranks: give its parts, tensor.unbind(), to a grouped verb, or "
            "torch.nested.to_padded_tensor(tensor, 0.0)"
        )


def is_plain_block(tensor: torch.Tensor) -> bool:
    """Return whether the values of ``tensor`` are what its memory holds, row after row."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def code_of(tensor: torch.Tensor, known: Mapping[torch.dtype, int] = DTYPES) -> int:
    """The engine's number of the dtype. Raises InvalidArgumentError if it is none of ``known``."""
    code = known.get(tensor.dtype)
    if code is None:
        raise FrontEndArgumentError(refusal(tensor.dtype))
    return code


def refusal(dtype: torch.dtype) -> str:
    """Return the message about a dtype with which something cannot be done."""
    if dtype.is_complex:
        return f"{dtype} is not supported; give torch.view_as_real(tensor), which shares its memory"
    if dtype.is_floating_point:
        return f"{dtype} is not supported; convert to torch.bfloat16 or another wider type"
    return f"{dtype} is not supported; convert to one of {', '.join(map(str, DTYPES))}"


def _not_a_tensor(value: Any) -> FrontEndArgumentError:
    return FrontEndArgumentError(
        f"need a torch.Tensor, not {type(value).__name__}; make one with torch.as_tensor()"
    )
