"""``fit`` with LocalSGD in an elastic job: the process in slot 1 is killed once, and replaced.

Run by the launcher with two ranks: ``periodic_fit_script.py FOLDER``. The model is that of
``periodic_replay``, and what a process computes follows from its number and the step. Who comes to
the end writes SLOT.json.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import periodic_replay as replay

from kolovod import elastic
from kolovod.core.transaction import transaction

FULL, EVERY, PER_EPOCH = 2, 4, 6
DEATH = 9  # steps


def slow_weights(model: Any) -> list[Any]:
    return [np.asarray(w).tolist() for w in model.get_weights()]


def main() -> None:
    keras = importlib.import_module("keras")
    keras.backend.set_floatx("float64")
    kv = importlib.import_module("kolovod.keras")
    kv.init()
    slot, is_first = int(os.environ["KOLOVOD_SLOT"]), bool(os.environ["KOLOVOD_FIRST_HOSTS"])
    model = replay.model_of(keras, keras.backend.backend())
    local_sgd = kv.callbacks.LocalSGD(EVERY)
    local_sgd.set_model(model)
    log = elastic.MembershipLog()
    state = elastic.State(local_sgd=local_sgd, log=log, epoch=0, batch=0, step=0, history=[])
    found: dict[int, Any] = {}

    class Watch(keras.callbacks.Callback):  # type: ignore[name-defined,misc]
        """Counts steps, and notes what there is after each."""

        def note_ranks(self) -> None:
            members = list(transaction().world.members)  # type: ignore[union-attr]
            if not state.history or state.history[-1][1] != members:
                state.history.append([state.step, members])

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.note_ranks()
            if state.step == DEATH and is_first and slot == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            state.step += 1
            found[state.step] = slow_weights(model)
            time.sleep(0.02)

    def batches() -> Any:
        step = state.step
        while True:
            row = np.array([replay.factors(log.member % 5, step)])
            yield row, row[:, 0]
            step += 1

    @elastic.run
    def train(state: Any) -> None:
        def is_over() -> bool:
            since, members = state.history[-1] if state.history else (0, [])
            came_later = len(state.history) > 2 and len(members) == FULL
            return came_later and state.step >= since + 3 * PER_EPOCH

        watch = Watch()
        while state.batch or not is_over():
            model.fit(
                batches(), initial_epoch=state.epoch, epochs=state.epoch + 1, verbose=0,
                steps_per_epoch=PER_EPOCH - state.batch,
                callbacks=[local_sgd, kv.callbacks.CommitCallback(state), watch],
            )  # fmt: skip
        local_sgd.synchronize()

    train(state)
    facts = {
        "slot": slot,
        "member": log.member,
        "log": [step.used for step in log.steps],
        "history": state.history,
        "steps": state.step,
        "found": found,
        "last": slow_weights(model),
    }
    Path(sys.argv[1], f"{slot}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
