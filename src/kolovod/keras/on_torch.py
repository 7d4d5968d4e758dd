"""Gradients of Keras on PyTorch: tensors, step by step."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from kolovod import _native
from kolovod.core.codecs import Codec
from kolovod.core.submission import Group
from kolovod.core.transaction import transaction
from kolovod.gradients import exchange
from kolovod.gradients.alike import ELEMENTS, place_of_bad
from kolovod.gradients.compression.compressor import Verb
from kolovod.gradients.spec import ReduceSpec
from kolovod.private_apis.torch import uncompiled
from kolovod.torch.verbs import collectives

T = TypeVar("T")

varies = True
"""Whether a variable may have a gradient in one step and none in the next."""


SPARSE = None
"""Nothing ``is_sparse`` here, so nothing sends it."""


def start(
    spec: ReduceSpec, verb: Verb, name: str, tensors: list[torch.Tensor], codecs: Sequence[Codec]
) -> Callable[[], Sequence[torch.Tensor]]:
    """Reduce or gather ``tensors`` as one group, maybe in place; return what waits for them."""
    keeps = transaction().is_elastic  # them, to be sent once more if a rank is lost
    return exchange.by(collectives, spec, in_place=not keeps)(verb, name, tensors, codecs)


def run_in_transaction(
    combine: Callable[[Sequence[Any]], Sequence[Any]], grads: Sequence[Any], *, counts: bool
) -> list[Any]:
    """``combine(grads)`` as a step of an elastic job; see ``elastic.exactly``."""
    return list(transaction().run(lambda: combine(grads), counts=counts))


@uncompiled
def run_alone(function: Callable[..., T], *args: Any) -> T:
    """``function(*args)``: where Keras compiles its step (``jit_compile``), between two parts."""
    return function(*args)


def together(tensors: Sequence[torch.Tensor], process_set: Group | None) -> list[torch.Tensor]:
    """``tensors`` of several groups."""
    return list(tensors)


def is_traced(grads: Sequence[Any]) -> bool:
    """Return False: no gradients stand for those of a program that is being made."""
    return False


def is_sparse(grad: Any) -> bool:
    """Return False: no gradient is gathered; one with gaps is sent without them."""
    return False


def dense(grad: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` without gaps."""
    return grad.to_dense() if grad.layout is not torch.strided else grad


def zeros(variable: Any) -> torch.Tensor:
    """Return zeros for a variable that has no gradient in this step."""
    return torch.zeros_like(variable.value, requires_grad=False)


def share(size: int, process_set: Group | None) -> float:
    """The share of one of ``size`` ranks."""
    return 1.0 / size


def scaled(grad: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor`` times ``grad``."""
    return grad * factor


def flags(present: Sequence[bool], like: torch.Tensor) -> torch.Tensor:
    """Return 1 for each gradient that is there, else 0, to be added up over ranks."""
    return torch.tensor(present, dtype=torch.float32, device=like.device)


@torch.no_grad()
def facts(
    count: Any,
    rate: Any,
    variables: Sequence[Any],
    every: int,
    grads: Sequence[Any],
    process_set: Group | None,
) -> torch.Tensor:
    """Return a table with the facts of ``alike``: four numbers, in this rank's row.

    The last one tells which of ``grads`` is not finite.
    """
    steps_taken, total = int(count), 0
    for variable in variables if steps_taken % every == 0 else ():
        value = variable.value.detach()
        if value.is_cpu and value.is_contiguous():
            total = _native.hash_memory(value.data_ptr(), value.nbytes, total)
    here = collectives.membership(process_set)
    bad = (
        place_of_bad(i + 1, here.size, here.rank)
        for i, grad in enumerate(grads)
        if grad.is_cpu and not grad.reshape(-1)[:ELEMENTS].isfinite().all()
    )
    table = torch.zeros(here.size, 4, dtype=torch.int32)
    numbers = struct.unpack("<ii", struct.pack("<fi", float(rate), total % 2**31))
    row = [steps_taken + 1, *numbers, next(bad, 0)]
    table[here.rank] = torch.tensor(row, dtype=torch.int32)
    return table


def tell_where(table: torch.Tensor, tell: Callable[[Any], None]) -> None:
    """Have ``tell(table)`` called where its rows are not equal."""
    there = table[table[:, 0] > 0]
    if bool((there != there[:1]).any()):
        tell(table.cpu())


def in_last_pass(
    optimizer: Any, reduced: Callable[[list[Any]], list[Any]], grads: list[Any]
) -> list[Any]:
    """Return ``reduced(grads)``: Keras asks for it in the last of several passes only."""
    return reduced(grads)
