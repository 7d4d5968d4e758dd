"""Optimizers whose state is in parts: gradients are clipped by the norm of all parts."""

from __future__ import annotations

import pytest
import torch
from optimizing import wrapped
from sharding import (
    Model,
    assert_equal,
    batch,
    train,
    values,
)
from torch_loopback import run

from kolovod.errors import InvalidArgumentError


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_uses_the_norm_of_all(norm_type):
    def work(verbs, rank):
        found = []
        for shard_state in (False, True):
            norms = []

            def clip(model, norms=norms):
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type))
                torch.nn.utils.clip_grad_value_(model.wide.parameters(), 0.01)

            model = Model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            wrapped(model, verbs, optimizer=optimizer, shard_state=shard_state)
            train(model, optimizer, rank, before_step=clip)
            found.append((norms, values(model)))
        (plain, wanted), (ours, weights) = found
        for one, other in zip([*ours, *weights], [*plain, *wanted], strict=True):
            torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-5, atol=1e-5)
        assert max(ours) > 0.1  # something was clipped
        return ours, weights

    (first_norms, first), *others = run(3, work)
    for norms, weights in others:
        assert_equal(norms, first_norms)
        assert_equal(weights, first)


def test_clipping_what_is_not_finite():
    def work(verbs, rank):
        model = Model()
        optimizer = wrapped(
            model, verbs, optimizer=torch.optim.AdamW(model.parameters()), shard_state=True
        )
        loss = model(batch(0, rank), True)
        (loss * (float("inf") if rank else 1.0)).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        with pytest.raises(InvalidArgumentError, match="norm_type is 0"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, 0.0)
        assert optimizer.state_dict()["state"] == {}

    run(2, work)
