"""An elastic job in a cluster, to which a test does something while it runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import partial

import numpy as np

__all__ = ["check_results", "growing", "said", "works_with"]


def trained(folder, stop):
    """An elastic rank: counts its steps until the file ``stop`` is there."""
    import kolovod as kv
    from kolovod import elastic

    kv.init()
    state = elastic.State(total=np.zeros(1), sizes=0, step=0, pids=[os.getpid()])
    own = os.getpid()

    @elastic.run
    def train(state):
        is_over = False
        while not is_over:
            said = np.array([1.0, float(os.path.exists(stop) and kv.rank() == 0)])
            total = elastic.exactly(partial(kv.allreduce, said, op=kv.Sum, name="step"))
            state.total = state.total + total[0]
            state.sizes += kv.size()
            state.step += 1
            is_over = total[1] > 0
            new = folder / f"{own}.new"
            new.write_text(f"{kv.rank()} {kv.size()} {state.step}")
            new.rename(folder / f"{own}")  # whole, whenever this process is killed
            time.sleep(0.02)
            state.commit()

    train(state)
    return own, kv.size(), state.step, float(state.total[0]), state.sizes


def said(folder):
    """By process, what it has written last: rank, size, step."""
    found = {}
    for path in folder.iterdir():
        if path.name.isdigit():
            rank, size, step = map(int, path.read_text().split())
            found[int(path.name)] = rank, size, step
    return found


def check_results(results, size, survivors):
    """Of ``size`` ranks at the end; the processes ``survivors``, which were not restarted, too."""
    pids = {pid for pid, *_ in results}
    assert len(results) == len(pids) == size
    assert survivors <= pids
    assert len({tuple(state) for _, *state in results}) == 1
    _, size_at_end, _, total, sizes = results[0]
    assert size_at_end == size
    assert total == sizes  # each step has counted once, with all that were there


@contextlib.contextmanager
def growing(run, folder):
    """A job of ``trained``, by ``run(fn, args)``; ended with the context in any case.

    It, the folder where its ranks write, and the file that has it end.
    """
    said_in, stop = folder / "said", folder / "stop"
    said_in.mkdir()
    job = Background(partial(run, trained, (said_in, stop)))
    try:
        yield job, said_in, stop
    finally:
        stop.touch()
        job.thread.join(60)


class Background:
    """A job that runs while the test does something to it."""

    def __init__(self, job):
        """``job()`` is called on a thread."""
        self.results = self.error = None

        def call():
            try:
                self.results = job()
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=call, daemon=True)
        self.thread.start()

    def wait_for(self, condition, seconds=90.0):
        """While it runs: raises what it has failed by."""
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.thread.is_alive():
                raise AssertionError(f"the job has ended: {self.result()}")
            assert time.monotonic() < deadline, "it did not come to that"
            time.sleep(0.1)

    def result(self):
        self.thread.join(90)
        assert not self.thread.is_alive(), "the job has not ended"
        if self.error is not None:
            raise self.error
        return self.results


def works_with(folder, size):
    """Whether ranks 0 to size - 1 make steps in a world of that size."""
    before = said(folder)
    time.sleep(0.3)
    after = said(folder)
    alive = {pid: now for pid, now in after.items() if now != before.get(pid)}
    return len(alive) == size and {now[1] for now in alive.values()} == {size}
