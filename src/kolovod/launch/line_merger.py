"""Lines that several ranks write within a moment, to be shown once: decides, writes nothing.

Each rank's lines wait in a queue of their own, for ``window_s`` at most, for the same line of other
ranks. What comes out of a queue is always its first line, so each rank's lines keep their order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass

__all__ = ["LineMerger", "MergedLine", "rank_ranges"]

WINDOW_S = 0.5
MOST_CHARS = 4 << 20
_LOOK_AHEAD_LINES = 64
_OVERHEAD_CHARS = 200  # of a line that waits, beside its text


@dataclass(frozen=True)
class MergedLine:
    """A line to be shown."""

    ranks: tuple[int, ...]
    """The ranks that have written it, ascending."""
    line: str
    stamp: str
    """The stamp of the rank that wrote it first."""


@dataclass(frozen=True)
class _Waiting:
    line: str
    time_s: float
    stamp: str


class LineMerger:
    """A merger of lines, not for several threads. Times are of any clock that never goes back."""

    def __init__(self, window_s: float = WINDOW_S, most_chars: int = MOST_CHARS) -> None:
        """``most_chars``: where more than that wait, the oldest are shown early."""
        self._window_s = window_s
        self._most_chars = most_chars
        self._queues: dict[int, deque[_Waiting]] = {}  # of ranks that may write more, or have lines
        self._ended: set[int] = set()
        self._holders: defaultdict[str, Counter[int]] = defaultdict(Counter)  # of lines that wait
        self._arrivals: deque[tuple[int, int]] = deque()  # rank, number of its line
        self._given: Counter[int] = Counter()  # lines that each rank has given
        self._shown: Counter[int] = Counter()  # and that were shown
        self._chars = 0

    def open(self, rank: int) -> None:
        """Let ``rank`` write lines from now on."""
        self._queues.setdefault(rank, deque())
        self._ended.discard(rank)

    def add(self, rank: int, line: str, now_s: float, stamp: str = "") -> list[MergedLine]:
        """Take a line of ``rank``; return what is to be shown by now."""
        self.open(rank)
        self._queues[rank].append(_Waiting(line, now_s, stamp))
        self._holders[line][rank] += 1
        self._arrivals.append((rank, self._given[rank]))
        self._given[rank] += 1
        self._chars += len(line) + _OVERHEAD_CHARS
        merged = self._agreed()
        while self._chars > self._most_chars:
            merged += self._show_oldest()
        return merged

    def end(self, rank: int) -> list[MergedLine]:
        """``rank`` writes no more: nobody waits for it. Returns what is to be shown by now."""
        if rank in self._queues:
            self._ended.add(rank)
            self._forget_ended(rank)
        return self._agreed()

    def due(self, now_s: float) -> list[MergedLine]:
        """Return the lines that have waited long enough."""
        merged: list[MergedLine] = []
        while (due_s := self.due_s()) is not None and due_s <= now_s:
            merged += self._show_oldest()
        return merged

    def due_s(self) -> float | None:
        """Return when ``due`` has something to say; None: nothing waits."""
        first = self._oldest()
        return None if first is None else self._queues[first][0].time_s + self._window_s

    def rest(self) -> list[MergedLine]:
        """Return all that waits."""
        merged: list[MergedLine] = []
        while self._oldest() is not None:
            merged += self._show_oldest()
        return merged

    def _oldest(self) -> int | None:
        """Return the rank whose first line has waited longest."""
        while self._arrivals:
            rank, number = self._arrivals[0]
            if number >= self._shown[rank]:
                return rank
            self._arrivals.popleft()
        return None

    def _agreed(self) -> list[MergedLine]:
        """Return the lines that come first for every rank: they wait for nobody."""
        merged = []
        while self._queues and (queue := next(iter(self._queues.values()))):
            line = queue[0].line
            if any(not each or each[0].line != line for each in self._queues.values()):
                break
            merged.append(self._show(line))
        return merged

    def _show_oldest(self) -> list[MergedLine]:
        """Return the line that waited longest, with those of other ranks before the same line."""
        rank = self._oldest()
        if rank is None:
            return []
        line = self._queues[rank][0].line
        merged = []
        for other in list(self._holders[line]):
            for before in self._lines_before(other, line):
                # A line that was shown with those before another one may be gone by now.
                if self._queues[other][0].line == before:
                    merged.append(self._show(before))
        return [*merged, self._show(line), *self._agreed()]

    def _lines_before(self, rank: int, line: str) -> list[str]:
        """Return the lines to show before, so that ``line`` comes first for ``rank``, too.

        There are none if those are many, or if ranks for which ``line`` comes first have some of
        them later: they would not be merged with theirs.
        """
        before: list[str] = []
        for waiting in self._queues[rank]:
            if waiting.line == line:
                return before
            if len(before) == _LOOK_AHEAD_LINES:
                break
            holders = self._holders[waiting.line]
            if any(self._queues[holder][0].line == line for holder in holders):
                break
            before.append(waiting.line)
        return []

    def _show(self, line: str) -> MergedLine:
        """Show ``line``, of all ranks for whom it comes first."""
        ranks = sorted(r for r in self._holders[line] if self._queues[r][0].line == line)
        first = min((self._queues[rank][0] for rank in ranks), key=lambda each: each.time_s)
        for rank in ranks:
            self._queues[rank].popleft()
            self._shown[rank] += 1
            self._chars -= len(line) + _OVERHEAD_CHARS
            self._forget_ended(rank)
            self._holders[line][rank] -= 1
            if not self._holders[line][rank]:
                del self._holders[line][rank]
        if not self._holders[line]:
            del self._holders[line]
        return MergedLine(tuple(ranks), line, first.stamp)

    def _forget_ended(self, rank: int) -> None:
        if rank in self._ended and not self._queues[rank]:
            del self._queues[rank]
            self._ended.discard(rank)


def rank_ranges(ranks: tuple[int, ...]) -> str:
    """Return ascending numbers in short, for example "0-3,7"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
