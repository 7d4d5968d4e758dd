"""An elastic job that reads a dataset: which samples count, while its processes kill themselves.

Run by the launcher: ``elastic_data_script.py SAMPLES EPOCHS 2:0:3,0:1:5``: the process that begins
in slot 2 ends in epoch 0 after its third step, that in slot 0 in epoch 1 after the fifth. A process
that comes to the end prints one line of JSON: the samples of each epoch that are in its results.
With ``by_speed`` as the last argument a process in slot 1 is three times as fast as one in slot 0.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
from sampled import KnownSpeed

import kolovod.numpy as kv
from kolovod import elastic

BATCH = 3
SLOT = int(os.environ.get("KOLOVOD_SLOT", os.environ["KOLOVOD_RANK"]))
BEGINS = bool(os.environ.get("KOLOVOD_FIRST_HOSTS"))


def ends_of(text: str) -> set[tuple[int, int]]:
    """Epoch and step of those ends that are this process's."""
    plan = [tuple(map(int, part.split(":"))) for part in text.split(",") if part]
    return {(epoch, step) for slot, epoch, step in plan if slot == SLOT and BEGINS}


def main() -> None:
    count, epochs, ends = int(sys.argv[1]), int(sys.argv[2]), ends_of(sys.argv[3])
    kv.init()
    if "by_speed" in sys.argv:
        sampler = elastic.ElasticSampler(
            range(count), 2 * BATCH, pad=False, samples_per_step=8, by_speed=True
        )
        sampler._meter = KnownSpeed(1.0 + 2.0 * SLOT)  # type: ignore[assignment]
    else:
        sampler = elastic.ElasticSampler(range(count), BATCH, pad=False)
    state = elastic.State(sampler=sampler, epoch=0, used=[], sums=[])

    @elastic.run
    def train(state: Any) -> None:
        for epoch in range(state.epoch, epochs):
            state.epoch = epoch
            sampler.set_epoch(epoch)
            if len(state.used) == epoch:
                state.used.append(np.zeros(count))
                state.sums.append(0.0)
            for step in sampler.steps(sampler.batches()):
                is_last = (epoch, sampler.steps_done) in ends
                if is_last:
                    delay_s = random.uniform(0, 0.01)
                    threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
                mine, value = np.zeros(count), 0.0
                samples = sampler.samples
                for batch, weight in step:
                    if weight:
                        mine[batch] += 1
                        value += weight * float(np.mean(batch))
                used, mean = elastic.exactly(
                    lambda mine=mine, value=value: (
                        kv.allreduce(mine, "used", kv.Sum),
                        float(kv.allreduce(np.array([value]), "mean")[0]),
                    ),
                    counts=True,
                )
                state.used[epoch] += used
                if used.sum() == samples:  # else a rank was lost, and the mean is that of the rest
                    assert abs(mean - float((used * np.arange(count)).sum() / samples)) < 1e-9
                state.commit()
                if is_last:
                    threading.Event().wait()  # it is about to be killed
                time.sleep(0.005)

    train(state)
    used = [each.tolist() for each in state.used]
    print(json.dumps({"slot": SLOT, "used": used, "shares": sampler.shares}), flush=True)


if __name__ == "__main__":
    main()
