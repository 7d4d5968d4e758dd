"""``model.fit`` in an elastic job, whose processes kill themselves as its arguments say.

Run by the launcher: ``elastic_fit_script.py PACKAGE EPOCHS STEPS 1:0:3,0:1:2``: the process that
begins in slot 1 ends in epoch 0 in its fourth batch, that in slot 0 in epoch 1 in its third. Each
process that comes to the end prints one line of JSON: which slots took part in each step of each
epoch, as bits, what the callbacks were told of epochs, and the weights.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import numpy as np
from elastic_frameworks import BIT, SLOT, WIDTH, OfKeras

import kolovod.keras as kv
from kolovod import elastic
from kolovod.keras.elastic import written_back

BEGINS = bool(os.environ["KOLOVOD_FIRST_HOSTS"])
RANKS = int(os.environ["KOLOVOD_RANKS_OF_TEST"])


def main() -> None:
    epochs, steps = int(sys.argv[2]), int(sys.argv[3])
    plan = [tuple(map(int, part.split(":"))) for part in sys.argv[4].split(",")]
    ends = {(epoch, batch) for slot, epoch, batch in plan if slot == SLOT and BEGINS}
    work, is_ending = OfKeras(sys.argv[1]), threading.Event()
    state = elastic.State(epoch=0, batch=0, log=[], told=[], **work.values())

    class Watch(importlib.import_module(sys.argv[1]).callbacks.Callback):
        """Who takes part in each step; ends this process in the middle of one, and waits."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if is_ending.is_set():
                threading.Event().wait()  # it is about to be killed
            written_back(self.model)
            self.before = work.value()
            if (state.epoch, state.batch) in ends:
                is_ending.set()
                delay_s = random.uniform(0, 0.01)
                threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            written_back(self.model)
            state.log.append((state.epoch, round(self.before - work.value())))
            if state.log[-1][1] != (1 << RANKS) - 1:
                time.sleep(0.3)  # others need the cores to come

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            state.told.append((epoch, state.batch, float(np.asarray(logs["loss"]))))

    def batches() -> Any:
        while True:
            yield np.full((1, 1), BIT), (np.zeros((1, 1)), np.zeros((1, WIDTH)))

    @elastic.run
    def train(state: Any) -> None:
        everybody = (1 << RANKS) - 1
        while state.batch or state.epoch < epochs or state.log[-1][1] != everybody:
            callbacks = [
                kv.callbacks.BroadcastGlobalVariablesCallback(),
                kv.callbacks.MetricAverageCallback(),
                Watch(),
                kv.callbacks.CommitCallback(state),
            ]
            work.model.fit(
                batches(), initial_epoch=state.epoch, epochs=state.epoch + 1, verbose=0,
                steps_per_epoch=steps - state.batch, callbacks=callbacks,
            )  # fmt: skip

    train(state)
    facts = {"slot": SLOT, "log": state.log, "told": state.told, "result": work.result(state)}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
