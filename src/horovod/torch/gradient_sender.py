"""``optimizer._allreduce_grad_async``: one gradient, sent by itself.

Horovod's hooks call it, and code knows a Horovod optimizer by it. Kolovod's hooks send buckets of
gradients instead, so to replace it changes nothing.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from horovod.common.arguments import op_of
from horovod.torch.arguments import given
from horovod.torch.autograd import plain
from horovod.torch.handles import number_of
from kolovod.core.codecs import Codec
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.compression import Blocks
from kolovod.torch.distributed import Distributed
from kolovod.torch.parameters import names_of_group

__all__ = ["add_gradient_sender"]


def add_gradient_sender(
    optimizer: Distributed,
    compression: Any,
    op: int,
    predivide: float,
    sparse_as_dense: bool,
    process_set: ProcessSet | None,
) -> None:
    """Give ``optimizer`` the method, with the options that it has itself."""
    own = weakref.ref(optimizer)  # or it would keep itself alive
    send = functools.partial(_send, own, compression, op, predivide, sparse_as_dense, process_set)
    optimizer._allreduce_grad_async = send  # type: ignore[attr-defined]


def _send(
    own: weakref.ref[Distributed],
    compression: Any,
    op: int,
    predivide: float,
    sparse_as_dense: bool,
    process_set: ProcessSet | None,
    parameter: torch.Tensor,
) -> tuple[int, Any]:
    """Start to average the gradient of ``parameter``, in place if it is not compressed.

    Returns a handle for ``hvd.synchronize``, and what ``compression.decompress`` takes beside the
    result. No gradient counts as zeros. Raises ValueError for a parameter that is not one of the
    optimizer's, or has a sparse gradient that is not to become dense.
    """
    optimizer = own()
    assert optimizer is not None  # whoever calls this has it
    groups, names = optimizer.param_groups, optimizer._kolovod_names
    named = (pair for g in range(len(groups)) for pair in names_of_group(groups, g, names))
    name = next((name for name, known in named if known is parameter), None)
    if name is None:
        raise FrontEndArgumentError(
            f"a tensor of shape {tuple(parameter.shape)} is no parameter of this optimizer, or one "
            "that it does not average"
        )
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        if not sparse_as_dense:
            raise FrontEndArgumentError(
                f"the gradient of '{name}' is sparse: call optimizer.synchronize(), or make the "
                "optimizer with sparse_as_dense=True"
            )
        parameter.grad = parameter.grad.to_dense()
    small, context = compression.compress(parameter.grad)
    is_encoded = isinstance(compression, Blocks)
    codec = compression.codec_of(name, parameter.dim()) if is_encoded else Codec.none
    scales = 1.0 / predivide, predivide
    arguments = given("allreduce", f"allreduce.{name}", op_of(op, None), *scales, process_set)
    return number_of(plain.allreduce_async_(small, *arguments, compression=codec)), context
