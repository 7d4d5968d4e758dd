"""Which rank steps with which whole tensor, and which of them travel together.

Some optimizers (Muon, Shampoo, Adafactor) need a whole matrix for its step, so a sharded one gives
each tensor to one rank. A reducescatter has equally many elements for every rank: what travels
together holds as many for each as for the rank that gets most, and the rest is padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_FULL = 0.75
"""Tensors travel when no more than a quarter of what they travel in is padding."""


class Owners:
    """The rank of each tensor, among ``size`` ranks.

    The tensors that are known first are dealt largest first, each to the rank that has fewest
    elements (R. L. Graham, Bounds on Multiprocessing Timing Anomalies, 1969), so no rank has more
    than 4/3 of the least that is possible.
    """

    def __init__(self, size: int, elements: Mapping[int, int]) -> None:
        """``elements``: by a tensor's index."""
        self.rank_of: dict[int, int] = {}
        self._elements: dict[int, int] = {}
        self._had = [0] * size
        self._deal(sorted(elements, key=lambda index: (-elements[index], index)), elements)

    def add(self, elements: Mapping[int, int]) -> None:
        """Deal more, in the order of their indices: whether at once or one by one is the same."""
        self._deal(sorted(elements), elements)

    def together(self, order: Iterable[int], least: int) -> list[list[int]]:
        """Return the tensors in groups of at least so many elements, with little padding.

        ``order``: that in which backward makes their gradients.
        """
        groups: list[list[int]] = []
        row: list[int] = []
        for index in order:
            row.append(index)
            count = sum(self._elements[each] for each in row)
            if count >= max(least, _FULL * self.travelling(row)):
                groups.append(row)
                row = []
        while row and groups:
            joined = [*groups[-1], *row]
            if self.travelling(joined) >= self.travelling(groups[-1]) + self.travelling(row):
                break
            groups.pop()
            row = joined
        return [*groups, row] if row else groups

    def travelling(self, indices: Sequence[int]) -> int:
        """Return the elements that travel with these tensors: for each rank as many as for one."""
        return len(self._had) * self.room(indices)

    def room(self, indices: Iterable[int]) -> int:
        """Return the most elements of these tensors that one rank has."""
        rooms = [0] * len(self._had)
        for index in indices:
            rooms[self.rank_of[index]] += self._elements[index]
        return max(rooms)

    def _deal(self, order: Iterable[int], elements: Mapping[int, int]) -> None:
        for index in order:
            rank = self._had.index(min(self._had))
            self.rank_of[index] = rank
            self._elements[index] = elements[index]
            self._had[rank] += elements[index]
