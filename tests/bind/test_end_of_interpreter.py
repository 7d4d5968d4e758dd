"""Threads that are in the engine when the interpreter ends."""

from __future__ import annotations

import pytest
from launched import run_code
from slow import slow_but

WAITING = """
import atexit, threading
import numpy as np
import kolovod.numpy as kv
kv.init()
if rank == 1:
    kv.barrier()
    time.sleep(3)  # the other one looks for signals all the while
    os._exit(0)
def wait(number):
    kv.allreduce(np.ones(4), name=f"nobody else's {number}")
for number in range(4):
    threading.Thread(target=wait, args=(number,), daemon=True).start()
kv.barrier()
IN_PYTHON
atexit._clear()  # so that nothing of Kolovod ends the threads' waits first
atexit.register(time.sleep, 0.2)
class Slow:
    def __del__(self):  # while modules are taken down
        time.sleep(1.5)
sys.modules["slow"] = Slow()
"""


IN_PYTHON = """
from kolovod import _native
_native.watch_long_waits(lambda engine, handle, waits: time.sleep(0.05))
time.sleep(0.5)
"""


@pytest.mark.parametrize(
    "meanwhile", slow_but([""], ["", IN_PYTHON]), ids=["in the engine", "in Python"]
)
def test_a_thread_that_waits_does_not_abort_the_process(meanwhile: str) -> None:
    """Python ends such a thread when it wants the interpreter's lock: it must not be by SIGABRT."""
    done = run_code(2, WAITING.replace("IN_PYTHON", meanwhile), "--keep-going")
    assert "terminate called" not in done.stderr
    assert "SIGABRT" not in done.stderr
