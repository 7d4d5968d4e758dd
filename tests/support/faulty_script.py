"""A training script of which one rank does something bad at one place; others say what they hear.

``python faulty_script.py PLACE FAULT CULPRIT FRAMEWORK ON_SIGTERM``. FRAMEWORK is numpy, or torch:
then gradients and checkpoint are PyTorch's. ON_SIGTERM is "ends", or "goes on": then the others
ignore the launcher's SIGTERM, and say what they hear however slow the machine is.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time

PLACE, FAULT, CULPRIT, FRAMEWORK, ON_SIGTERM = sys.argv[1:]
RANK = int(os.environ["KOLOVOD_RANK"])
IS_CULPRIT = int(CULPRIT) == RANK


def here(place):
    """The rank whose turn it is does what it is to do."""
    if place == PLACE and IS_CULPRIT:
        print("at", time.monotonic(), flush=True)
        commit()


def commit():
    if FAULT == "exit 7":
        if PLACE == "atexit":  # there Python takes no SystemExit
            os._exit(7)
        sys.exit(7)
    elif FAULT == "exception":
        raise ValueError("loss is nan\nat step 17")
    elif FAULT == "SIGSEGV":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), signal.Signals[FAULT])


def import_all():
    global np, kv, torch
    import numpy as np

    if FRAMEWORK == "torch":
        import torch

        import kolovod.torch as kv
    else:
        import kolovod as kv
    here("import")


def init():
    import kolovod.lifecycle

    make_engine = kolovod.lifecycle.make_engine

    def make_engine_or_not(*args, **kwargs):
        here("init")  # the others know this rank, and wait for it to take the segment
        return make_engine(*args, **kwargs)

    kolovod.lifecycle.make_engine = make_engine_or_not
    kv.init()


def step(last):
    """A step of training, with gradients on their way while others are computed."""
    pending = []
    for number in range(8):
        if last and number == 4:
            here("backward")
        gradient = np.full(20_000, float(number), np.float32)
        pending.append(kv.allreduce_async(gradient, name=f"gradient.{number}"))
    for number, handle in enumerate(pending):
        assert (handle.wait() == number).all()


def torch_step(last):
    global model, optimizer
    if not last:
        model = torch.nn.Sequential(*[torch.nn.Linear(200, 200) for _ in range(6)])
        optimizer = kv.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
    else:
        model[2].register_full_backward_hook(lambda *_: here("backward"))
    model(torch.ones(4, 200)).sum().backward()
    optimizer.step()


def checkpoint():
    """One rank writes it, the others wait."""
    if IS_CULPRIT:
        with tempfile.TemporaryFile() as file:
            if FRAMEWORK == "torch":
                torch.save(model.state_dict(), file)
            else:
                np.savez(file, weight=np.ones((300, 300)))
            here("checkpoint")
    kv.barrier()


def main():
    if ON_SIGTERM == "goes on" and not IS_CULPRIT:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import_all()
    init()
    atexit.register(here, "atexit")  # so called before ours, while the world is there
    here("first op")
    kv.allreduce(np.ones(4) if FRAMEWORK == "numpy" else torch.ones(4), name="first")
    train = torch_step if FRAMEWORK == "torch" else step
    train(last=False)
    train(last=True)
    checkpoint()
    here("shutdown")
    if PLACE != "atexit":
        kv.shutdown()


if __name__ == "__main__":
    # In a session of its own, so that only the job's mark tells that it belongs to it.
    subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        main()
    except Exception as error:
        if not IS_CULPRIT:
            rank = getattr(error, "rank", None)
            line = str(error).splitlines()[0]
            print("heard", time.monotonic(), type(error).__name__, rank, line, flush=True)
        raise
