"""DiLoCo of JAX in an elastic job, two of whose processes are killed and replaced.

Run by the launcher with three ranks: ``periodic_jax_script.py FOLDER``. The first death is between
two exchanges; the second in one, when the process has its results and has not passed the ticket.
Who comes to the end writes SLOT.json: who was in each exchange, who came when, and what it has had
after each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import periodic_replay as replay

import kolovod.jax as kv
from kolovod import elastic
from kolovod.core.transaction import transaction

FULL, EVERY = 3, 6
OPTIONS = {"fragments": 3, "fragment_sync_delay": 3, "local_share": 0.25}
VICTIMS = (1, 0)  # slots


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kv.init()
    slot = int(os.environ["KOLOVOD_SLOT"])
    outer = optax.sgd(replay.OUTER_RATE, momentum=replay.OUTER_MOMENTUM, nesterov=True)
    inner = optax.sgd(replay.RATE, momentum=replay.MOMENTUM)
    diloco = kv.diloco(inner, outer, EVERY, **OPTIONS)
    chain = optax.chain(optax.identity(), diloco)
    # Rank 0's is what all begin with.
    params = [jnp.asarray(leaf) + (slot > 0) for leaf in replay.start()]
    training = kv.LocalTraining(diloco, params, chain.init(params))
    log = elastic.MembershipLog()
    state = elastic.State(training=training, log=log, step=0, kills=0, history=[])
    found: dict[int, Any] = {}

    @jax.jit
    def step(params: Any, opt_state: Any, member: Any, number: Any) -> Any:
        grads = [replay.gradient(p, member, number, place) for place, p in enumerate(params)]
        updates, opt_state = chain.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, number + 1

    def note(key: int) -> None:
        found[key] = [np.asarray(leaf).tolist() for leaf in training.params]

    def follow(state: Any) -> None:
        members = list(transaction().world.members)  # type: ignore[union-attr]
        if not state.history or state.history[-1][1] != members:
            state.history.append([state.step, members])

    def is_due(state: Any) -> bool:
        since, members = state.history[-1]
        return len(members) == FULL and state.step == since - since % EVERY + 2 * EVERY + 1

    @elastic.run
    def train(state: Any) -> None:
        follow(state)
        while True:
            if is_due(state):
                if state.kills == len(VICTIMS):
                    break
                if slot == VICTIMS[state.kills]:
                    if state.kills == 0:
                        die()
                    transaction()._pass = die  # type: ignore[method-assign,union-attr]
                state.kills += 1
            state.step = int(training.step(step, log.member % 5, state.step))
            note(state.step)
            state.commit()
            follow(state)
            time.sleep(0.02)
        training.synchronize()
        state.commit()
        note(state.step + 1)

    train(state)
    facts = {
        "slot": slot,
        "member": log.member,
        "log": [step.used for step in log.steps],
        "history": state.history,
        "steps": state.step,
        "found": found,
    }
    Path(sys.argv[1], f"{slot}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
