"""A running job, looked at again and again: its processes by /proc, and what they show."""

from __future__ import annotations

import time
from collections.abc import Callable

from kolovod.launch.running_jobs import RunningJob, RunningRank
from kolovod.observe.live.picture import Picture, Watched, picture
from kolovod.observe.live.watching import RankWatch, host_memory_left

__all__ = ["JobWatch"]


class JobWatch:
    """The ranks of one job that are on this host."""

    def __init__(self, find: Callable[[], RunningJob | None]) -> None:
        """``find``: the job as it is now; None: it has ended."""
        self._find = find
        self._watches: dict[int, RankWatch] = {}
        self._before: dict[int, tuple[float, float, int]] = {}

    def look(self) -> tuple[RunningJob, Picture] | None:
        """Return the job now, at most once in half a second; None: it has ended.

        The first look shows processes only: who is watched begins to show what it does.
        """
        job = self._find()
        if job is None:
            return None
        present = {each.pid for each in job.ranks}
        for pid in self._watches.keys() - present:
            self._watches.pop(pid).close()
        watched = [self._watched(each) for each in job.ranks]
        return job, picture(watched, host_memory_left())

    def _watched(self, process: RunningRank) -> Watched:
        watch = self._watches.get(process.pid)
        if watch is None:
            watch = self._watches[process.pid] = RankWatch(process.pids)
        watch.pids = process.pids
        watch.look()
        now_s, written = time.monotonic(), watch.written_bytes()
        then_s, cpu_s, bytes_then = self._before.get(process.pid, (now_s, process.cpu_s, written))
        self._before[process.pid] = now_s, process.cpu_s, written
        took_s = now_s - then_s
        return Watched(
            number=process.rank,
            pid=watch.pid,
            state=process.state,
            cpu=max(0.0, process.cpu_s - cpu_s) / took_s if took_s > 0 else 0.0,
            memory_bytes=process.memory_bytes,
            written_bytes_per_s=max(0, written - bytes_then) / took_s if took_s > 0 else 0.0,
            window=watch.window,
            seen=watch.seen,
            problem=watch.problem,
        )

    def close(self) -> None:
        """Watch no more; the ranks stop to show themselves within five seconds."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
