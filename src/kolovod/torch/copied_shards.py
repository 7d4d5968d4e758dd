"""Shards in elastic jobs: each part is on two ranks, which step with it alike.

With a rank its part of the state would be lost. So the averaged gradients of a part go to a second
rank as well, before any rank uses the step's results, and both change the part by them: an update
that works element by element gives both the same bits. In the next world whoever is left has each
part once at least, and the parts are dealt anew (``resharding.py``). A job that is not elastic has
nothing of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kolovod.core.handles import Handle
from kolovod.core.transaction import transaction
from kolovod.core.world import World
from kolovod.errors import FrontEndArgumentError, JobOverError
from kolovod.gradients.holders import Held, Span, copied_by, moves
from kolovod.torch.buckets import Item
from kolovod.torch.pieces import Cut, Part, Piece, Pieces, flat_of
from kolovod.torch.resharding import Job, exchange
from kolovod.torch.shards import ShardSender

Sent = tuple[list[Part], Handle[tuple[torch.Tensor, list[int]]]]


class CopiedShards(ShardSender):
    """A ShardSender that keeps copies where ranks may be lost."""

    move_state: Callable[[CopiedShards], Callable[[], None]]
    """Gets the optimizer's state to where ``next`` has it; see ``resharding.to_next_cut``."""

    def begin_world(self) -> None:
        """Begin anew: ranks have agreed, and parts are cut anew."""
        self._check_everybody()
        super().begin_world()
        self._copies: dict[int, torch.Tensor] = {}
        self._to_send: dict[int, torch.Tensor] = {}  # memory for it, the same in each step

    def complete(self) -> list[Callable[[], None]]:
        """Copy gradients; and state, when ranks step for the first time in a world."""
        if not transaction().is_elastic:
            return []
        self._check_everybody()
        if self.next is self.cut and not self.cut.holders:  # of steps before ``elastic.run``
            self.next = Cut(self.parameters, self.verbs.world(), has_copies=True)
        for part in self.parts():
            self.next.take(part)
        self._copy_gradients()
        return [] if self.next is self.cut else [self.move_state(self)]

    def store(
        self, done: Sequence[Item], is_used: Callable[[int], bool], scale_of_sum: float
    ) -> None:
        """Put results where the optimizer looks for them, those of the copied parts, too."""
        super().store(done, is_used, scale_of_sum)
        for index, *_ in done if self._copies else ():
            received = self._copies.pop(index, None)
            if received is not None:
                self.cut.copy.get(index)
                if is_used(index):
                    self.cut.copy.add(index, received)

    def counted(self) -> list[Pieces]:
        """Return own pieces, and the copies where the rank is lost whose part they are of."""
        if not transaction().is_elastic or not self.cut.holders:
            return super().counted()
        members = self._world_with_all_parts().members
        is_there = self.cut.members[self.cut.copied] in members
        return [self.cut.own] if is_there else list(self.cut.both())

    def gather_exactly(self) -> None:
        """Give all ranks what each has stepped with, whoever is lost meanwhile.

        Raises JobOverError where nobody is left who has stepped with a part.
        """

        def attempt() -> None:
            world = self._world_with_all_parts()
            if world.members != self.cut.members:
                self._gather_from_those_left(world)
                return
            for _, wait in self.gather():
                wait()

        transaction().run(attempt)

    def parts(self) -> list[Part]:
        """All parts, in an order that is the same on all ranks."""
        everything = (part for _, part in self.all_parts())
        return sorted(everything, key=lambda part: part.indices[0])

    def spans(self, rank: int) -> list[Span]:
        """Return the spans that a rank has in ``next``, its own and the copies."""
        copied = copied_by(self.next.hosts).index(rank)
        both = [*self._pieces(rank), *self._pieces(copied)]
        return [Span(piece.index, piece.begin, piece.end) for piece in both]

    def _pieces(self, rank: int) -> Iterator[Piece]:
        for part in self.parts():
            yield from part.pieces_of(rank)

    def _copy_gradients(self) -> None:
        """Send gradients of this rank's part to who has the copy of it, as all ranks do."""
        after, tensors = self.next, self.parameters.tensors
        kinds: dict[Any, list[Part]] = defaultdict(list)
        for part in self.parts():
            like = tensors[part.indices[0]]
            kinds[like.dtype, like.device].append(part)
        under_way: list[Sent] = []
        for number, parts in enumerate(kinds.values()):
            own = [self._received[piece.index] for part in parts for piece in part.pieces]
            flat = self._joined(number, own, tensors[parts[0].indices[0]])
            splits = [0] * after.size
            splits[after.holders[after.rank]] = flat.numel()
            name = f"copies.{number}.{self.parameters.names[parts[0].indices[0]]}"
            under_way.append((parts, self.verbs.alltoall_async(flat, splits, name)))
        for parts, handle in under_way:
            received, _ = handle.wait()
            at = 0
            for part in parts:
                for piece in part.pieces_of(after.copied):
                    length = piece.end - piece.begin
                    self._copies[piece.index] = received[at : at + length]
                    at += length

    def _joined(self, number: int, own: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        if len(own) == 1:
            return own[0]
        count = sum(values.numel() for values in own)
        kept = self._to_send.get(number)
        if kept is None or kept.numel() != count:
            kept = self._to_send[number] = like.new_empty(count, requires_grad=False)
        return torch.cat(own, out=kept) if own else kept

    def _world_with_all_parts(self) -> World:
        """Return the current world. Raises JobOverError if its ranks lack a part stepped with."""
        world = self.verbs.world()
        assert isinstance(world, World)
        lost = self.cut.lost(world.members)
        if lost:
            raise JobOverError(lost)
        return world

    def _gather_from_those_left(self, world: World) -> None:
        """Gather all parameters from the ranks left, in the world that follows the cut's."""
        before, tensors = self.cut, self.parameters.tensors
        flats = [flat_of(*pair) for pair in zip(tensors, self.parameters.names, strict=True)]
        have: list[list[Held]] = []
        for member in world.members:
            held: list[Held] = []
            if member in before.members:
                rank = before.members.index(member)
                copied = before.holders.index(rank)
                for of, is_copy in ((rank, False), (copied, True)):
                    held += [
                        Held(piece.index, piece.begin, piece.end, is_copy)
                        for piece in self._pieces(of)
                    ]
            have.append(held)
        indices = sorted(index for part in self.parts() for index in part.indices)
        everything = [Span(index, 0, flats[index].numel()) for index in indices]
        found, _ = moves(have, [everything] * world.size)

        def read(job: Job, begin: int, end: int) -> torch.Tensor:
            return flats[job.parameter][begin:end]

        def write(job: Job, begin: int, end: int, received: torch.Tensor) -> None:
            flats[job.parameter][begin:end].copy_(received)

        jobs = [Job(index, "parameter", tensors[index].dtype) for index in indices]
        with torch.no_grad():
            exchange(self.verbs, jobs, found, read, write, tensors)

    def _check_everybody(self) -> None:
        if transaction().is_elastic and self._spec.process_set is not None:
            raise FrontEndArgumentError(
                "shard_state in an elastic job is among all ranks, since the parts of a rank that "
                f"is lost go to the others, but process_set is {self._spec.process_set!r}: leave "
                "it out, or use no shards"
            )
