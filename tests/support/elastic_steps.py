"""An elastic script for tests that kill launchers: it makes steps until it is told to end."""

from __future__ import annotations

from waiting import DEADLINE_S, until

__all__ = ["DEADLINE_S", "STEPS", "until"]

STEPS = """
import os, sys, time
import kolovod.numpy as kv
from kolovod import elastic
kv.init()
folder = sys.argv[1]
state = elastic.State(step=0, ends=False, moments=[])


def note(name):
    with open(f"{folder}/new{kv.rank()}", "w") as file:
        file.write(f"{state.step} {kv.size()} {os.getpid()}")
    os.rename(f"{folder}/new{kv.rank()}", f"{folder}/{name}")


@elastic.run
def train(state):
    while not state.ends:
        # Before the step, which no rank passes without rank 0, so that the line is there whenever
        # that is killed; and by the next rank 0 where it is killed before, and the others go on.
        is_due, has_printed = state.step % 20 == 19, False
        if is_due and kv.rank() == 0:
            print("step", state.step + 1, flush=True)
            has_printed = True
        ends = float(os.path.exists(folder + "/end"))
        state.ends = elastic.exactly(lambda: kv.allreduce(ends, "ends", op=kv.Max)) > 0
        if is_due and kv.rank() == 0 and not has_printed:
            print("step", state.step + 1, flush=True)
        state.step += 1
        state.moments.append(time.monotonic())
        state.commit()
        note("on " + os.environ["KOLOVOD_HOST"])
        if kv.rank() == 0 and state.step % 20 == 0:
            note("step")
        time.sleep(0.002)


train(state)
if kv.rank() == 0:
    waits = [b - a for a, b in zip(state.moments, state.moments[1:])]
    print("steps", state.step, len(state.moments), "longest", max(waits), flush=True)
raise SystemExit(int(sys.argv[2]))
"""
"""Its arguments: a folder, and the exit code. It ends when the folder has a file "end". Rank 0
notes each twentieth step in "step", each rank each step in "on HOST": the step, the number of
ranks, and its pid."""
