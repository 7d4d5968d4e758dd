"""Horovod's allreduce and reducescatter, and their grouped and asynchronous forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from horovod.common.arguments import named, op_of
from horovod.common.basics import Average, Sum
from horovod.common.process_sets import global_process_set, group_of
from horovod.torch import handles
from horovod.torch.arguments import Tensor, Tensors, given, several
from horovod.torch.autograd import plain, verbs
from horovod.torch.compression import Compression
from kolovod.core.codecs import codec_in
from kolovod.core.handles import Handle
from kolovod.errors import FrontEndArgumentError

Finish = Callable[[Any], Any]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> Tensor:
    """The ranks' tensors combined, as a new tensor; has a gradient."""
    scales = prescale_factor, postscale_factor
    arguments = given("allreduce", name, op_of(op, average), *scales, process_set)
    small, context = compression.compress(tensor)
    result = verbs.allreduce(small, *arguments, compression=codec_in(compression))
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
) -> list[Tensor]:
    """``allreduce`` of several tensors as one operation."""
    scales = prescale_factor, postscale_factor
    arguments = given("grouped_allreduce", name, op_of(op, average), *scales, process_set)
    smalls, contexts = zip(*map(compression.compress, several(tensors)), strict=True)
    results = verbs.grouped_allreduce(smalls, *arguments, compression=codec_in(compression))
    return list(map(compression.decompress, results, contexts))


def _of_one(verb: str, doc: str, finish: Finish) -> Callable[..., Any]:
    """Make a form of allreduce without compression; ``finish`` makes what it returns."""
    form = getattr(plain, verb)

    def run(
        tensor: Tensor,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Any = global_process_set,
    ) -> Any:
        scales = prescale_factor, postscale_factor
        arguments = given("allreduce", name, op_of(op, average), *scales, process_set)
        return finish(form(tensor, *arguments))

    run.__name__, run.__qualname__, run.__doc__ = verb, verb, doc
    return run


def _of_several(verb: str, doc: str, finish: Finish) -> Callable[..., Any]:
    """Make a form of allreduce for a group; ``finish`` makes what it returns."""
    form = getattr(plain, verb)

    def run(
        tensors: Tensors,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: Any = global_process_set,
    ) -> Any:
        scales = prescale_factor, postscale_factor
        arguments = given("grouped_allreduce", name, op_of(op, average), *scales, process_set)
        return finish(form(several(tensors), *arguments))

    run.__name__, run.__qualname__, run.__doc__ = verb, verb, doc
    return run


def _number_of_tuple(handle: Handle[Any]) -> int:
    return handles.number_of(handle, tuple)


_AT_ONCE = "Return a handle of ``{}`` at once."
allreduce_ = _of_one("allreduce_", "Reduce in place.", lambda tensor: tensor)
allreduce_async = _of_one("allreduce_async", _AT_ONCE.format("allreduce"), handles.number_of)
allreduce_async_ = _of_one("allreduce_async_", _AT_ONCE.format("allreduce_"), handles.number_of)
grouped_allreduce_ = _of_several(
    "grouped_allreduce_", "Reduce in place; a tuple, as from ``synchronize``.", tuple
)
grouped_allreduce_async = _of_several(
    "grouped_allreduce_async", _AT_ONCE.format("grouped_allreduce"), _number_of_tuple
)
grouped_allreduce_async_ = _of_several(
    "grouped_allreduce_async_", _AT_ONCE.format("grouped_allreduce_"), _number_of_tuple
)


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: Any = global_process_set
) -> Callable[[], Tensor]:
    """Start to average sparse tensors, or to add them up; return what waits for it.

    Raises ValueError for another ``op``, by which Horovod adds them up, too.
    """
    if op not in (Average, Sum):
        raise FrontEndArgumentError(f"op of sparse_allreduce_async is {op!r}: give Average or Sum")
    group = group_of(process_set)
    coalesced = tensor.coalesce()
    pending = plain.grouped_allgather_async(
        [coalesced.indices().t().contiguous(), coalesced.values()],
        named("sparse_allreduce", name),
        group,
    )
    divisor = plain.membership(group).size if op == Average else 1

    def wait() -> Tensor:
        indices, values = pending.wait()
        if divisor != 1:
            values = values / divisor
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    return wait


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """``allreduce`` of which each rank keeps a part of the rows; has a gradient."""
    scales = prescale_factor, postscale_factor
    arguments = given("reducescatter", name, op, *scales, process_set)
    small, context = compression.compress(tensor)
    result = verbs.reducescatter(small, *arguments)
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """``reducescatter`` that returns a handle at once."""
    scales = prescale_factor, postscale_factor
    arguments = given("reducescatter", name, op, *scales, process_set)
    return handles.number_of(plain.reducescatter_async(tensor, *arguments))


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """``reducescatter`` of several tensors as one operation."""
    scales = prescale_factor, postscale_factor
    arguments = given("grouped_reducescatter", name, op, *scales, process_set)
    smalls, contexts = zip(*map(compression.compress, several(tensors)), strict=True)
    results = verbs.grouped_reducescatter(smalls, *arguments)
    return list(map(compression.decompress, results, contexts))


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """``grouped_reducescatter`` that returns a handle at once."""
    scales = prescale_factor, postscale_factor
    arguments = given("grouped_reducescatter", name, op, *scales, process_set)
    return handles.number_of(plain.grouped_reducescatter_async(several(tensors), *arguments), tuple)
