"""Sharded optimizers and communication hooks where gradients are on a GPU; the GPU is a fake."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import test_sharded  # noqa: E402
import torch_loopback  # noqa: E402
from fake_device import FakeFrontend  # noqa: E402
from test_gradient_hooks import (  # noqa: E402, F401
    test_a_buffer_may_be_replaced,
    test_a_hook_that_averages,
    test_power_sgd,
    test_what_is_thrown_away_is_sent_again,
)
from test_sharded import (  # noqa: E402, F401
    test_a_state_goes_on_with_other_numbers_of_ranks,
    test_parameters_that_are_gathered_in_forward,
    test_parameters_that_move_thaw_and_come_later,
)
from test_sharded_clipping import test_clipping_uses_the_norm_of_all  # noqa: E402, F401


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(torch_loopback, "TorchFrontend", FakeFrontend)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_as_without_shards(kind):
    test_sharded.test_as_without_shards(kind)
