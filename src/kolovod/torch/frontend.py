"""PyTorch's CPU tensors as the engine sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from kolovod import _native
from kolovod.errors import InvalidArgumentError
from kolovod.frontend import TensorView

# torch.uint16 came with PyTorch 2.3.
DTYPES: dict[torch.dtype, int] = {
    getattr(torch, name): code for name, code in _native.DTYPES.items() if hasattr(torch, name)
}
_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}
_empty_like = torch.empty_like


class TorchFrontend:
    """Dense tensors in host memory; autograd history is neither read nor made."""

    def is_tensor(self, value: object) -> bool:
        """Whether ``value`` is a tensor."""
        return isinstance(value, torch.Tensor)

    def view(self, tensor: torch.Tensor) -> TensorView:
        """See Frontend.view."""
        try:
            code = DTYPES[tensor.dtype]
            if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
                return code, tensor.shape, tensor.data_ptr(), tensor
        except (AttributeError, KeyError, RuntimeError):
            pass  # explained below
        return _slow_view(tensor)

    def empty_like(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """See Frontend.empty_like."""
        output = _empty_like(tensor)
        return output, output.data_ptr()

    def claim(self, tensor: torch.Tensor) -> None:
        """Tell autograd that the values change, so that a backward that saved them complains."""
        if not isinstance(tensor, torch.Tensor):
            raise _not_a_tensor(tensor)
        if not tensor.is_inference():
            increment_version(tensor)

    def copy_back(self, dense: torch.Tensor, tensor: torch.Tensor) -> None:
        """See Frontend.copy_back."""
        with torch.no_grad():
            tensor.copy_(dense)

    def from_bytes(
        self, data: npt.NDArray[np.uint8], dtype: int, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """See Frontend.from_bytes."""
        return torch.from_numpy(data).view(_BY_CODE[dtype]).reshape(shape)


def _slow_view(tensor: torch.Tensor) -> TensorView:
    """Make a dense copy, or say what is wrong."""
    if not isinstance(tensor, torch.Tensor):
        raise _not_a_tensor(tensor)
    if tensor.layout is not torch.strided:
        raise InvalidArgumentError(
            f"the tensor of shape {tuple(tensor.shape)} is {tensor.layout}; use .to_dense() (an "
            "embedding makes sparse gradients only with sparse=True)"
        )
    if not tensor.is_cpu:
        raise InvalidArgumentError(
            f"the tensor of shape {tuple(tensor.shape)} is on {tensor.device}, but this engine "
            "works in host memory: pass tensor.cpu()"
        )
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise InvalidArgumentError(refusal(tensor.dtype))
    with torch.no_grad():
        dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return code, dense.shape, dense.data_ptr(), dense


def refusal(dtype: torch.dtype) -> str:
    """What to say of a dtype that the engine does not know."""
    if dtype.is_complex:
        return f"{dtype} is not supported; give torch.view_as_real(tensor), which shares its memory"
    if dtype.is_floating_point:
        return f"{dtype} is not supported; convert to torch.bfloat16 or another wider type"
    return f"{dtype} is not supported; convert to one of {', '.join(map(str, DTYPES))}"


def _not_a_tensor(value: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"need a torch.Tensor, not {type(value).__name__}; make one with torch.as_tensor()"
    )
