"""Tensors on GPUs in c10d's collectives: they travel by copies in host memory.

An operation takes its input when the stream that was current at its submission has come to it, for
which the host waits, and puts its results on that stream, whoever completes it. A thread that waits
for the work has them when the stream that is current there has come to them. So all is as with
NCCL's group, but for the time that it takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from kolovod.torch.device import Cuda
from kolovod.torch.frontend import TorchFrontend

__all__ = ["device", "following", "frontend", "is_on_device", "on", "stream_of"]

frontend = TorchFrontend(is_direct=lambda: False)
"""Tests have another, with a device that needs no GPU."""


def device() -> Cuda:
    """Return the device that copies."""
    return frontend.device


def is_on_device(tensor: object) -> bool:
    """Return whether it is a tensor of elements in a GPU's memory."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and frontend.device.is_on_device(tensor)
    )


def stream_of(tensors: Iterable[object]) -> Any:
    """The current stream of the first of them that is on a GPU; None: none is."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and frontend.device.is_on_device(tensor):
            return frontend.device.stream_of(tensor)
    return None


def on(stream: Any) -> AbstractContextManager[None]:
    """Make ``stream`` current, if there is one."""
    return contextlib.nullcontext() if stream is None else frontend.device.on(stream)


def following(stream: Any) -> None:
    """Let the current stream come after what is on ``stream`` now, if there is one."""
    if stream is not None:
        frontend.device.follow([stream])
