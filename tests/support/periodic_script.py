"""LocalSGD or DiLoCo of PyTorch in an elastic job, two of whose processes are killed and replaced.

Run by the launcher with three ranks: ``periodic_script.py CASE FOLDER``. The first death is between
two exchanges, and the others wait until they could know; the second is in an exchange, when the
process has all results and has not passed its ticket. Who comes to the end writes SLOT.json: who
was in each exchange, who came when, and what it has had after each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from periodic_elastic import CASES, begin, compute, sums

import kolovod
from kolovod import elastic
from kolovod.core.transaction import transaction
from kolovod.core.world import current

FULL = 3
VICTIMS = (1, 0)  # slots
PAUSE_S = 0.02
WAIT_S = 30.0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Script:
    """A process."""

    def __init__(self, case: str) -> None:
        self.slot = int(os.environ["KOLOVOD_SLOT"])
        self.every = CASES[case]["sync_every"]
        self.model, self.inner, self.way = begin(case, 10 + self.slot)
        self.log = elastic.MembershipLog()
        self.found: dict[int, list[int]] = {}
        self.moved_between = False

    @property
    def ongoing(self) -> Any:
        return transaction()

    def follow(self, state: Any) -> None:
        """Note who is there, on all ranks after the same step."""
        members = list(self.ongoing.world.members)
        if not state.history or state.history[-1][1] != members:
            state.history.append([state.step, members])

    def is_due(self, state: Any) -> bool:
        """Whether it is time for another death, or the end."""
        since, members = state.history[-1]
        return len(members) == FULL and state.step == since - since % self.every + 3 * self.every

    def die_or_wait(self, kills: int) -> None:
        if self.slot == VICTIMS[kills]:
            if kills == 0:
                die()
            self.ongoing._pass = die
        elif kills == 0:
            deadline = time.monotonic() + WAIT_S
            while not self.ongoing._recovery.has_failed:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            epoch = current().epoch
            self.ongoing.follow()
            self.moved_between = current().epoch > epoch

    def train(self, state: Any) -> None:
        self.follow(state)
        while True:
            if self.is_due(state):
                if state.kills == len(VICTIMS):
                    break
                self.die_or_wait(state.kills)
                state.kills += 1
            state.step += 1
            compute(self.model, self.log.member, state.step)
            self.inner.step()
            self.found[state.step] = sums(self.model, self.way)
            state.commit()
            self.follow(state)
            time.sleep(PAUSE_S)
        self.way.synchronize()
        state.commit()
        self.found[state.step + 1] = sums(self.model, self.way)

    def facts(self, state: Any) -> dict[str, Any]:
        return {
            "slot": self.slot,
            "member": self.log.member,
            "log": [step.used for step in self.log.steps],
            "history": state.history,
            "steps": state.step,
            "found": self.found,
            "moved_between": self.moved_between,
        }


def main() -> None:
    kolovod.init()
    script = Script(sys.argv[1])
    state = elastic.State(way=script.way, log=script.log, step=0, kills=0, history=[])
    elastic.run(script.train)(state)
    Path(sys.argv[2], f"{script.slot}.json").write_text(json.dumps(script.facts(state)))


if __name__ == "__main__":
    main()
