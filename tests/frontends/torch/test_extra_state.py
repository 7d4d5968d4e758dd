"""Modules with an extra state: what a state dict has of it is a copy."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from forked import run_torch_ranks  # noqa: E402


class Counting(torch.nn.Linear):
    """Has a tensor that is neither a parameter nor a buffer, as modules of 8 bits have."""

    def __init__(self, count):
        super().__init__(1, 1)
        self.count = count

    def get_extra_state(self):
        return torch.tensor([self.count])

    def set_extra_state(self, state):
        self.count = int(state)


def broadcast(rank):
    import kolovod.torch as kv

    kv.init()
    model = torch.nn.Sequential(Counting(rank), torch.nn.Linear(1, 1))
    state = model.state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kv.broadcast_parameters(state, 1)
        kv.broadcast_parameters(model.named_parameters(), 1)
    kept = model[0].count
    model.load_state_dict(state)
    return [(str(one.message), one.filename) for one in caught], kept, model[0].count


def test_a_script_is_told_that_it_is_not_broadcast():
    for rank, (said, kept, loaded) in enumerate(run_torch_ranks(2, broadcast)):
        ((text, file),) = said
        assert text.startswith("params['0._extra_state'] is a copy")
        assert file == __file__
        assert (kept, loaded) == (rank, 1)
