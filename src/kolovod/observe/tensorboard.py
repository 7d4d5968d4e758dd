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

__all__ = ["begin", "forget", "scalars"]

_EVERY_S = 5.0


def scalars(before: Totals, after: Totals, took_s: float) -> dict[str, float]:
    """What is written of ``took_s`` seconds between two looks, by tag. PURE."""
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


class _Scalars:
    """A thread that writes them, from the first world until the process ends."""

    def __init__(self, world: World, folder: str) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(folder)
        self.counting = counting.counting(world)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kolovod-scalars", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            before, at_s = Totals(), time.monotonic()
            while True:
                stopping = self._stopping.wait(_EVERY_S)
                (totals, world), now_s = self.counting.totals(), time.monotonic()
                # A world has always one rank 0, which may be another process in the next one.
                if world is None or world.rank == 0:
                    self._write(before, totals, now_s - at_s)
                before, at_s = totals, now_s
                if stopping:
                    return
        except Exception as error:  # the disk is full, say; training goes on
            report_to_stderr(f"no more scalars for TensorBoard: {error!r}")

    def _write(self, before: Totals, after: Totals, took_s: float) -> None:
        # Without an optimizer's steps, operations are what goes on.
        step = after.steps or after.counters.get("operations", 0)
        for tag, value in scalars(before, after, took_s).items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def end(self) -> None:
        self._stopping.set()
        self._thread.join()
        counting.end(self.counting)
        self._writer.close()


_scalars: _Scalars | None = None


def begin(world: World) -> None:
    """A world has been formed: write scalars if KOLOVOD_TENSORBOARD_DIR says so."""
    global _scalars
    folder = world.settings.tensorboard_dir
    if not folder or world.rank != 0 or _scalars is not None:
        return
    if (problem := missing("tensorboard")) is not None:
        report_to_stderr(str(problem))
        return
    _scalars = _Scalars(world, folder)


def end() -> None:
    """Write the rest, and no more."""
    global _scalars
    scalars_of_now, _scalars = _scalars, None
    if scalars_of_now is not None:
        scalars_of_now.end()


def forget() -> None:
    """In a forked child: the thread and the file are the parent's."""
    global _scalars
    _scalars = None


os.register_at_fork(after_in_child=forget)
