"""A process's part in an elastic job, as Horovod's scripts know it: a member from ``init`` on.

``kolovod.elastic.run`` lets a process that comes later be alone until it calls that. Horovod's
scripts ask for rank and size before, and return to the beginning of their function in each world,
so here ``init`` waits until the others have stopped for it.

Where a job is not elastic all of this does nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import numpy as np

import kolovod
from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.uncaught import first_line
from kolovod.core.world import current
from kolovod.elastic.membership_client import MembershipClient
from kolovod.elastic.running import join, resign
from kolovod.errors import JobOverError, unreached_rank
from kolovod.notices import report_to_stderr

__all__ = ["enough", "entering", "failed", "gives_up", "must_sync", "client", "stops", "synced"]

_NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_WORD_OF_CHANGE_S = 2.0
"""The time within which the coordinator tells all ranks what it has told rank 0."""
_START_S = 60.0
"""How long processes on hosts that were found may take to come; else the same ranks go on."""


def client() -> MembershipClient | None:
    """Return the membership client that keeps this process, a member from now on, in its job.

    None: the job is not elastic.
    """
    return join()


@contextlib.contextmanager
def entering() -> Iterator[None]:
    """``init`` within this context enters a world of the job, and scripts find their new place.

    A process that is not wanted any more ends here: SystemExit(0).
    """
    own = client()
    try:
        if own is not None and kolovod.is_initialized() and current().epoch == 0:
            kolovod.shutdown()  # it was alone, by kolovod.init()
        yield
    except JobOverError as error:
        if not error.has_left:
            raise
        report_to_stderr(str(error))
        if own is not None:
            own.see_off()
        raise SystemExit(0) from None
    if own is not None:
        for name in _NUMBERS:
            os.environ[f"HOROVOD_{name.upper()}"] = str(getattr(current(), name))


def failed(error: BaseException) -> None:
    """Say that an operation has failed: another world must follow."""
    own = client()
    if own is not None:
        own.failed(first_line(error), unreached_rank(error))


def stops() -> None:
    """Stop for another world: all ranks have come to the same place.

    Where the coordinator knows of no reason, a script has stopped by itself; the same ranks go on.
    """
    own = client()
    if own is None:
        return
    began_s = heard_s = time.monotonic()
    while not own.expects_world:
        now = time.monotonic()
        if own.others_come and now < began_s + _START_S:
            heard_s = now
        if now > heard_s + _WORD_OF_CHANGE_S:
            own.failed("HostsUpdatedInterrupt was raised, though no hosts have changed")
            return
        time.sleep(0.005)
    own.stop_for_next()


def enough(reset: Callable[[], object]) -> None:
    """Wait for worlds, by ``reset``, until one has as many ranks as the job needs."""
    own = client()
    while own is not None and current().size < own.min_np:
        own.stop_for_next(is_wanted=False)
        reset()


def must_sync(wants: bool) -> bool:
    """Return whether a rank wants rank 0's state, or lacks it; the same answer on all ranks.

    All ranks of the world take part in this, so old ranks cannot skip the state while new ones wait
    for it.
    """
    own = client()
    if own is None:
        return wants
    verbs = Collectives(NumpyFrontend(), current)
    answer = np.array([wants or not own.has_state], np.uint8)
    verbs.allreduce_(answer, "horovod.elastic.sync", kolovod.Max)
    return bool(answer[0])


def synced() -> None:
    """Count this process among those that have the state."""
    own = client()
    if own is not None:
        own.got_state()


@contextlib.contextmanager
def gives_up() -> Iterator[None]:
    """Within this context the other ranks hear at once of an exception that leaves it."""
    try:
        yield
    except BaseException as error:
        ends_well = isinstance(error, SystemExit) and not error.code
        own = None if ends_well or isinstance(error, JobOverError) else client()
        if own is not None:
            resign(own, error)
        raise
