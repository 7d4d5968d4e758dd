"""Ways in which a script takes a tensor its memory while an operation is on its way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

COUNT = 1 << 20  # so large that its memory goes back to the system at once


def given_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((COUNT,), 7.0)


def set_to_another(tensor: torch.Tensor) -> None:
    tensor.set_(torch.full((COUNT,), 7.0))


def resized(tensor: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(4 * COUNT)
    tensor.set_(tensor.untyped_storage(), 0, (COUNT,))  # PyTorch leaves it with the new shape


def freed(tensor: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)


def dropped(tensor: torch.Tensor) -> None:
    """Nothing else refers to it when this is over."""
    del tensor


REPLACES = [given_data, set_to_another]
OTHERS = [resized, freed, dropped]


def values(result: Any) -> list[float]:
    if isinstance(result, list | tuple):
        result = result[0]
    return sorted({float(result[0]), float(result[-1])})
