"""Scalars for TensorBoard, as its own reader finds them."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from forked import run_ranks

import kolovod as kv
from kolovod.core import spans
from kolovod.core.spans import OPTIMIZER_STEP
from kolovod.observe.counting import Totals
from kolovod.observe.tensorboard import scalars


def test_scalars_are_of_the_time_between() -> None:
    before = Totals(10, 1.0, 2.0, 0.5, 1, {"bytes": 1000})
    after = Totals(30, 3.0, 6.0, 3.5, 1, {"bytes": 9000})
    assert scalars(before, after, 4.0) == {
        "kolovod/waiting": 0.5,
        "kolovod/communication": 1.0,
        "kolovod/bytes_per_second": 2000.0,
        "kolovod/steps_per_second": 5.0,
        "kolovod/hidden": 0.75,
    }
    idle = scalars(after, after, 4.0)
    assert idle["kolovod/waiting"] == 0
    assert not idle.keys() & {"kolovod/steps_per_second", "kolovod/hidden"}


def train(rank: int, folder: str) -> None:
    os.environ["KOLOVOD_TENSORBOARD_DIR"] = folder
    for _ in range(2):  # worlds
        kv.init()
        for _ in range(20):
            time.sleep(0.005)
            handle = kv.allreduce_async(np.ones(1_000, np.float32), name="gradient")
            with spans.span(OPTIMIZER_STEP):
                handle.wait()
        kv.barrier()
        kv.shutdown()


@pytest.mark.slow
@pytest.mark.frameworks
def test_rank_0_writes_and_steps_go_on_in_the_next_world(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(2, partial(train, folder=str(tmp_path)))
    assert len(list(tmp_path.iterdir())) == 1
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    values = [
        (each.step, float(each.tensor_proto.float_val[0]))
        for each in found.Tensors("kolovod/steps_per_second")
    ]
    assert [step for step, _ in values] == [20, 40]
    assert all(0 < value < 200 for _, value in values)
