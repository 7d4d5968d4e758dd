"""A state on its way to ranks that have joined, while all compute the next step.

While parameters do not change, between a ``commit`` and the update of the step that follows, those
who have the state send it to those who lack it: every rank its part, as messages between two ranks,
which are apart from the operations of all. Whoever lacks it computes that step as well, with the
parameters that it has made itself, and its gradients do not count. In the step's exchange, before
the ticket, all that was sent has come; behind the ticket all ranks make the same update. Where a
rank is lost before, everything is sent anew in the next world, by those who are left.

So the others pause only for what the transfer takes beyond computing, as in torchft's recovery
beside the first step (https://github.com/pytorch/torchft).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kolovod.core.handles import Handle
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.transfers import Transfers
from kolovod.elastic.steps import Steps
from kolovod.errors import CollectiveError

__all__ = ["HandingOver", "Portions"]

_TAGS = 1 << 62
"""Of messages of a state; scripts count theirs from 0."""


class Portions(Protocol):
    """A value of the state, in pieces."""

    @property
    def transfers(self) -> Transfers:
        """The operations by which pieces are sent."""
        ...

    @property
    def pieces(self) -> Sequence[Any]:
        """The pieces, of the same number and sizes on all ranks.

        Where the state is missing they are memory for it.
        """
        ...

    def checksum(self, piece: Any) -> int:
        """Return a checksum of a piece's bytes, of 64 bits, with a sign."""
        ...

    def take(self) -> None:
        """Take over all pieces: they have come."""
        ...


class _Piece(NamedTuple):
    number: int
    data: Any
    of: Portions


class HandingOver:
    """The hand-over of a state, as ``steps.HandOver`` describes it."""

    def __init__(
        self,
        portions: Sequence[Portions],
        ongoing: Steps,
        got_state: Callable[[], object],
    ) -> None:
        """``got_state()`` is called when all ranks have the state."""
        self._portions, self._ongoing, self._got_state = portions, ongoing, got_state
        self._started_in = -1  # the epoch of a world
        self._handles: list[Handle[Any]] = []
        self._routes: list[tuple[_Piece, int, int]] = []  # by whom, and to whom
        self._sums = Transfers(NumpyFrontend(), lambda: ongoing.present_world)

    def start(self) -> None:
        """Begin to send and to receive, in the world of now; returns at once."""
        world, lacking = self._ongoing.present_world, self._ongoing.lacking
        self._started_in, self._handles, self._routes = world.epoch, [], []
        givers = [rank for rank in range(world.size) if rank not in lacking]
        if not givers:
            raise CollectiveError(
                f"the ranks that had the state are lost, and of the {world.size} that are left "
                "nobody has received all of it: start again from a checkpoint"
            )
        for piece in self._pieces():
            for taker in sorted(lacking):
                giver = givers[(piece.number + taker) % len(givers)]
                if world.rank not in (giver, taker):
                    continue
                self._routes.append((piece, giver, taker))
                transfers, tag = piece.of.transfers, _TAGS + 2 * piece.number
                if world.rank == taker:
                    self._handles.append(transfers.irecv(piece.data, giver, tag))
                else:
                    self._handles.append(transfers.isend(piece.data, taker, tag))

    def deliver(self) -> None:
        """Send and receive this rank's part; see ``steps.HandOver``."""
        world = self._ongoing.present_world
        if world.epoch != self._started_in:
            self.start()
        if world.rank not in self._ongoing.lacking:
            for piece, _, taker in self._routes:  # while they are on their way
                told = np.array([piece.of.checksum(piece.data)])
                self._handles.append(self._sums.isend(told, taker, _TAGS + 2 * piece.number + 1))
        for handle in self._handles:
            handle.wait()
        self._handles = []
        if world.rank in self._ongoing.lacking:
            self._check()
            for portions in self._portions:
                portions.take()

    def _check(self) -> None:
        for piece, giver, _ in self._routes:
            told = np.zeros(1, np.int64)
            self._sums.recv(told, giver, _TAGS + 2 * piece.number + 1)
            if piece.of.checksum(piece.data) != told[0]:
                raise CollectiveError(
                    f"piece {piece.number} of the state has come from rank {giver} with other "
                    "bytes than were sent: a link, or a memory, is defective; see also --encrypt"
                )

    def over(self) -> None:
        """Note that all ranks have the state; see ``steps.HandOver``."""
        self._got_state()

    def _pieces(self) -> list[_Piece]:
        each = ((data, of) for of in self._portions for data in of.pieces)
        return [_Piece(number, *piece) for number, piece in enumerate(each)]
