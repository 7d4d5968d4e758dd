"""A training of an elastic job that changes its hosts, and so its size, after so many steps.

Run by the launcher: ``elastic_growing_script.py KIND HOSTS 1,2,3,1``: the file HOSTS, which the
job's discovery script prints, gets another number of slots after ten steps with as many ranks as it
says; ranks may come and leave one by one. Who comes to the end prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from elastic_frameworks import KINDS, SLOT

import kolovod
from kolovod import elastic

STEPS_BETWEEN = 10


def main() -> None:
    work, hosts = KINDS[sys.argv[1]](), Path(sys.argv[2])
    wanted = [int(size) for size in sys.argv[3].split(",")]
    state = elastic.State(step=0, log=[], sizes=[], stage=0, since=0, **work.values())

    @elastic.run
    def train(state: Any) -> None:
        while True:
            bits = work.step(state)
            state.log.append(bits)
            state.step += 1
            size = bits.bit_count()
            if not state.sizes or state.sizes[-1] != size:
                state.sizes.append(size)
            state.since = state.since + 1 if size == wanted[state.stage] else 0
            if state.since == STEPS_BETWEEN:
                state.stage, state.since = state.stage + 1, 0
                if state.stage == len(wanted):
                    return
                if kolovod.rank() == 0:
                    new = hosts.with_suffix(".new")
                    new.write_text(f"localhost:{wanted[state.stage]}\n")
                    os.rename(new, hosts)
            state.commit()
            time.sleep(0.1)

    train(state)
    facts = {"slot": SLOT, "log": state.log, "sizes": state.sizes, "result": work.result(state)}
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
