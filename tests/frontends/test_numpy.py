"""What kolovod.numpy has beside the verbs."""

from __future__ import annotations

import numpy as np
import pytest
from forked import run_ranks

from kolovod.errors import InvalidArgumentError, MismatchError


def test_broadcast_parameters():
    def work(rank):
        import kolovod.numpy as kv

        kv.init()
        weights = {"b": np.full(3, rank, "f4"), "a": np.full((2, 4), rank)[:, ::2]}
        before = dict(weights)
        kv.broadcast_parameters(weights, 1)
        assert all(weights[name] is before[name] for name in weights)
        assert weights["a"].tolist() == [[1, 1], [1, 1]]
        assert weights["b"].tolist() == [1, 1, 1]
        kv.broadcast_parameters({})

        fixed = np.ones(3)
        fixed.flags.writeable = False
        wrong = {
            "params is a list": [np.ones(3)],
            r"by name \(str\)": {1: np.ones(3)},
            "cannot be changed in place": {"a": 1.0},
            "is read-only": {"a": fixed},
            "dtype object": {"a": np.array([None])},
        }
        for text, params in wrong.items():
            with pytest.raises(InvalidArgumentError, match=text):
                kv.broadcast_parameters(params)
        for params, text in (
            ({f"a{rank}": np.ones(3)}, "rank 0 has 'a0'.*, rank 1 has 'a1'"),
            ({"a": np.ones(3 + rank)}, r"rank 0 has 'a' \(\(3,\).*, rank 1 has 'a' \(\(4,\)"),
        ):
            with pytest.raises(MismatchError, match=text):
                kv.broadcast_parameters(params)
        assert kv.size() == 2

    run_ranks(2, work)
