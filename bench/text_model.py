"""A small language model of characters, on the standard library's own text; needs only PyTorch.

A transformer of 0.25 million parameters predicts the next byte of Python's standard library. Every
tenth file is for validation. Which text a worker sees in a step follows from seed, rank and step,
so every way of training sees the same.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from models import Transformer
from torch import Tensor, nn
from torch.nn import functional

TOKENS, POSITIONS = 128, 64
VALIDATION_TEXTS = 64
LEARNING_RATE = 2e-3


def char_transformer() -> Transformer:
    """Return two layers of width 96: [N, 64] -> [N, 128, 64], scores of the next character."""
    return Transformer(96, 2, 4, TOKENS, POSITIONS, is_causal=True)


class Texts:
    """The standard library's modules as characters (one byte each, ASCII)."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        parts = [bytes(b & 127 for b in path.read_bytes()) for path in files]
        train = b"".join(part for index, part in enumerate(parts) if index % 10)
        validation = b"".join(parts[::10])
        self.train = torch.frombuffer(bytearray(train), dtype=torch.uint8)
        held_out = torch.frombuffer(bytearray(validation), dtype=torch.uint8)
        stride = len(held_out) // VALIDATION_TEXTS
        starts = torch.arange(VALIDATION_TEXTS) * stride
        self._validation = _windows(held_out, starts)

    def batch(self, seed: int, rank: int, step: int, texts: int) -> tuple[Tensor, Tensor]:
        """Return two [texts, 64] of int64: characters, and those that follow."""
        draw = torch.Generator().manual_seed((seed * 1_000 + rank) * 1_000_000 + step)
        starts = torch.randint(len(self.train) - POSITIONS - 1, (texts,), generator=draw)
        return _windows(self.train, starts)

    def validation_loss(self, model: nn.Module) -> float:
        """Return mean cross entropy, in nats per character."""
        with torch.no_grad():
            characters, following = self._validation
            return float(functional.cross_entropy(model(characters), following))


def _windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    places = starts[:, None] + torch.arange(POSITIONS + 1)
    window = text[places].long()
    return window[:, :-1], window[:, 1:]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return mean cross entropy of a batch."""
    return functional.cross_entropy(model(batch[0]), batch[1])
