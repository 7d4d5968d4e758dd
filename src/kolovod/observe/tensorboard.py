"""Scalars for TensorBoard: how fast rank 0 steps, and where its time goes."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from kolovod.core.world import World
from kolovod.notices import report_to_stderr
from kolovod.observe import counting
from kolovod.observe.counting import Totals
from kolovod.optional_dependencies import missing

__all__ = ["begin", "forget", "leave", "scalars"]

_EVERY_S = 5.0


def scalars(before: Totals, after: Totals, took_s: float) -> dict[str, float]:
    """Return the scalars to be written for ``took_s`` seconds between two looks, by tag. PURE."""
    communication_s = after.communication_s - before.communication_s
    found = {
        "kolovod/waiting": (after.waiting_s - before.waiting_s) / took_s,
        "kolovod/communication": communication_s / took_s,
        "kolovod/bytes_per_second": (
            (after.counters.get("bytes", 0) - before.counters.get("bytes", 0)) / took_s
        ),
    }
    if after.steps > before.steps:
        found["kolovod/steps_per_second"] = (after.steps - before.steps) / took_s
    if communication_s > 0:
        found["kolovod/hidden"] = (after.hidden_s - before.hidden_s) / communication_s
    return found


class _Writing:
    """Writes scalars, from the first world in which this process is rank 0 until it ends."""

    def __init__(self, world: World, folder: str) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(folder)
        self._counting = counting.counting(world)
        self._lock = threading.Lock()
        self._before, self._at_s = Totals(), time.monotonic()
        threading.Thread(target=self._serve, name="kolovod-scalars", daemon=True).start()

    def _serve(self) -> None:
        while True:
            time.sleep(_EVERY_S)
            self.write()

    def write(self) -> None:
        """Write what has happened since the last call."""
        with self._lock:
            (after, world), now_s = self._counting.totals(), time.monotonic()
            before, took_s = self._before, now_s - self._at_s
            self._before, self._at_s = after, now_s
            # In the next world of an elastic job rank 0 may be another process, which goes on.
            if self._writer is None or world is None or world.rank != 0:
                return
            # Without steps of an optimizer of ours, operations are what goes on.
            step = after.steps or after.counters.get("operations", 0)
            try:
                for tag, value in scalars(before, after, took_s).items():
                    self._writer.add_scalar(tag, value, step)
                self._writer.flush()
            except Exception as error:  # the disk is full, say; training goes on
                report_to_stderr(f"no more scalars for TensorBoard: {error!r}")
                self._writer = None


_writing: _Writing | None = None


def begin(world: World) -> None:
    """A world has been formed: write scalars if KOLOVOD_TENSORBOARD_DIR says so."""
    global _writing
    folder = world.settings.tensorboard_dir
    if not folder or world.rank != 0 or _writing is not None:
        return
    if (problem := missing("tensorboard")) is not None:
        report_to_stderr(str(problem))
        return
    try:
        _writing = _Writing(world, folder)
    except OSError as error:
        report_to_stderr(f"no scalars for TensorBoard in {folder}: {error}")


def leave() -> None:
    """The world of this process is about to end: write the rest of it."""
    if _writing is not None:
        _writing.write()


def forget() -> None:
    """Forget the writer in a forked child: its thread and its file are the parent's."""
    global _writing
    _writing = None


os.register_at_fork(after_in_child=forget)
