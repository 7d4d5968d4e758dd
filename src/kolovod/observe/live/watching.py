"""The ranks of a job on this host, watched from another process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kolovod.observe.live.page import PageReader, PageUnavailableError
from kolovod.observe.live.window import WINDOW_S, Look, Pending, Window

__all__ = ["RankWatch", "Seen"]

_STALE_S = 3.0


@dataclass
class Seen:
    """The facts that a rank shows of itself, besides those in its window."""

    facts: dict[str, Any] = field(default_factory=dict)
    """The newest page; see ``showing``."""
    look: Look | None = None
    """None: it does not show what it does."""
    look_before: Look | None = None
    sent_bytes_per_s: dict[int, float] = field(default_factory=dict)
    """The rate to each rank that it has a connection to, since the last look."""

    @property
    def rank(self) -> int | None:
        """The rank in the present world; None: the process is in none."""
        rank = self.facts.get("rank")
        return None if rank is None else int(rank)


class RankWatch:
    """One rank's process: what it shows, and what it has shown in the last seconds."""

    def __init__(self, pids: Sequence[int], proc: Path = Path("/proc")) -> None:
        """``pids``: of the rank's processes; one of them has called ``init``, or will."""
        self.pids = tuple(pids)
        self.pid = self.pids[0]
        """The one that shows itself, as soon as one does."""
        self._proc = proc
        self._reader: PageReader | None = None
        self._newest = 0
        self._sent: tuple[int, list[int]] | None = None
        self._last: Look | None = None
        self._before: Look | None = None
        self.window = Window()
        self.seen = Seen()
        self.problem = "not looked at yet"
        """Why there is nothing to see; "" else."""

    def look(self) -> None:
        """Ask it to show itself, and read what it shows."""
        try:
            if self._reader is None:
                self._reader = self._open()
            self._reader.ring()
            self._take(self._reader.read())
        except PageUnavailableError as error:
            self.problem = str(error)
            self.close()

    def _open(self) -> PageReader:
        problem = PageUnavailableError("it has ended")
        for pid in self.pids:
            try:
                reader = PageReader(pid, self._proc)
            except PageUnavailableError as error:
                problem = error
            else:
                self.pid, self._newest = pid, 0
                return reader
        raise problem

    def _take(self, facts: dict[str, Any]) -> None:
        before = self.seen.facts
        self.seen = Seen(facts)
        if facts.get("epoch") != before.get("epoch"):
            self.window, self._sent = Window(), None
            self._last = self._before = None
        for report in facts.get("reports", ()):
            if report["number"] > self._newest:
                self._newest = report["number"]
                operations = [tuple(each) for each in report["operations"]]
                spans = [(*each[:4], tuple(each[4])) for each in report["spans"]]
                self.window.add(operations, spans, report["lost"])
        now_ns = time.monotonic_ns()
        self.window.forget(now_ns - int(WINDOW_S * 1e9))
        at_ns = facts.get("at_ns")
        if "rank" not in facts:
            self.problem = "it is in no world now"
            self.close()  # the next one is on another page
        elif at_ns is None:
            self.problem = "it has been asked to show itself"
        else:
            silent_s = (now_ns - at_ns) / 1e9
            self.problem = f"no news for {silent_s:.0f} s" if silent_s > _STALE_S else ""
            self.seen.look = Look(at_ns, [Pending(*each) for each in facts["pending"]])
            if self._last is not None and self._last.at_ns < at_ns:
                self._before = self._last
            self._last = self.seen.look
            self.seen.look_before = self._before
            self._measure(at_ns, facts["sent_bytes"])

    def _measure(self, at_ns: int, sent: list[int]) -> None:
        before, self._sent = self._sent, (at_ns, sent)
        if before is not None and at_ns > before[0] and len(sent) == len(before[1]):
            took_s = (at_ns - before[0]) / 1e9
            self.seen.sent_bytes_per_s = {
                peer: (now - then) / took_s
                for peer, (then, now) in enumerate(zip(before[1], sent, strict=True))
                if now
            }

    def written_bytes(self) -> int:
        """Return how much its processes have written to files so far; 0 if that is not known."""
        total = 0
        for pid in self.pids:
            with contextlib.suppress(OSError):
                for line in (self._proc / str(pid) / "io").read_text().splitlines():
                    if line.startswith("write_bytes:"):
                        total += int(line.split()[1])
        return total

    def close(self) -> None:
        """Watch no more."""
        if self._reader is not None:
            with contextlib.suppress(OSError):
                self._reader.close()
            self._reader = None


def host_memory_left(proc: Path = Path("/proc")) -> float:
    """Return the share of this host's memory that is free for programs."""
    found = dict(line.split()[:2] for line in (proc / "meminfo").read_text().splitlines() if line)
    return int(found["MemAvailable:"]) / int(found["MemTotal:"])
