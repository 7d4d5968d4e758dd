"""Parameters in pieces: which elements a rank steps with, and views of them.

A part is a range of elements, so that ranks have equally many: of a large parameter, or of small
ones in a row. Where the optimizer needs whole tensors, each is one rank's. In an elastic job
a rank has the pieces of another rank as well, as copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kolovod.core.submission import WorldLike
from kolovod.core.world import World
from kolovod.errors import FrontEndArgumentError
from kolovod.gradients.holders import copied_by, orphans, said_of
from kolovod.gradients.owners import Owners
from kolovod.torch.parameters import Parameters


@dataclass(frozen=True)
class Piece:
    """The piece that a rank has of one parameter."""

    index: int
    begin: int
    end: int
    """Elements of the flat parameter."""
    at: int
    """The place where it begins in what the rank has of the part."""
    is_whole: bool = False
    """It is all of the parameter, and has its shape; others are flat."""


class Part:
    """Parameters that travel in one tensor, of which each rank has a range of elements."""

    def __init__(self, indices: Sequence[int], sizes: Sequence[int], rank: int, size: int) -> None:
        """``sizes``: the number of elements of each; ``rank``: this one, of ``size``."""
        self.indices, self.sizes = list(indices), list(sizes)
        self._ranks = size
        self.count = sum(sizes)
        """Elements, of all ranks."""
        self.pieces = self.pieces_of(rank)
        """The pieces of this rank, in order."""
        self.received = self._received()
        """Elements that a reducescatter brings this rank."""

    def pieces_of(self, rank: int) -> list[Piece]:
        """Return the pieces of a rank, in order; as a reducescatter cuts them."""
        least, more = divmod(self.count, self._ranks)
        begin = rank * least + min(rank, more)
        end = begin + least + (rank < more)
        pieces = []
        at = 0
        for index, length in zip(self.indices, self.sizes, strict=True):
            first, last = max(begin, at), min(end, at + length)
            if first < last:
                pieces.append(Piece(index, first - at, last - at, first - begin))
            at += length
        return pieces

    def to_scatter(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the flat gradients, by parameter, as a reducescatter is to get them."""
        return joined(flats)

    def _received(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)


class OwnedPart(Part):
    """Parameters that travel in one tensor, each of which one rank has as a whole."""

    def __init__(
        self, indices: Sequence[int], sizes: Sequence[int], owners: Owners, rank: int, size: int
    ) -> None:
        """``owners``: who has them. They are put in the order of their ranks."""
        rows = sorted(
            zip(indices, sizes, strict=True), key=lambda row: (owners.rank_of[row[0]], row[0])
        )
        self._rank_of = [owners.rank_of[index] for index, _ in rows]
        self._room = owners.room(indices)
        super().__init__([index for index, _ in rows], [count for _, count in rows], rank, size)

    def pieces_of(self, rank: int) -> list[Piece]:
        """Return the parameters that a rank has, as pieces."""
        pieces = []
        at = 0
        for index, length, owner in zip(self.indices, self.sizes, self._rank_of, strict=True):
            if owner == rank:
                pieces.append(Piece(index, 0, length, at, is_whole=True))
                at += length
        return pieces

    def to_scatter(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return them with zeros behind those of each rank, so that all get equally many."""
        filled = flats[0].new_empty(self._ranks * self._room)
        rooms = filled.view(self._ranks, self._room)
        ends = [0] * self._ranks
        places = []
        for flat, owner in zip(flats, self._rank_of, strict=True):
            begin = ends[owner]
            ends[owner] += flat.numel()
            places.append(rooms[owner, begin : ends[owner]])
        torch._foreach_copy_(places, list(flats))
        for room, end in zip(rooms, ends, strict=True):
            room[end:].zero_()
        return filled

    def _received(self) -> int:
        return self._room


class Pieces:
    """One rank's pieces of parameters, as views of these."""

    def __init__(self, parameters: Parameters) -> None:
        """Begin without any."""
        self.places: dict[int, Piece] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        """The pieces asked for so far, with gradients of their own, by the parameter's index."""
        self._parameters = parameters
        self._addresses: dict[int, int] = {}

    def take(self, pieces: Sequence[Piece]) -> None:
        """Add these pieces."""
        self.places.update((piece.index, piece) for piece in pieces)

    def get(self, index: int) -> torch.Tensor:
        """Return the piece of the parameter ``index``, made when it is first asked for."""
        return self.tensors[index] if index in self.tensors else self._make(index)

    def own_of(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of ``whole``, shaped as the parameter, that belong to its piece."""
        place = self.places[index]
        parameter = self._parameters.tensors[index]
        return self.shaped(index, laid_as(parameter, whole)[place.begin : place.end].clone())

    def shaped(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of a piece in the shape that the piece has."""
        if not self.places[index].is_whole:
            return flat
        return shaped_as(self._parameters.tensors[index], flat)

    def flat(self, index: int) -> torch.Tensor:
        """Return the elements of a piece, as a flat view without a gradient."""
        place = self.places[index]
        parameter, name = self._parameters.tensors[index], self._parameters.names[index]
        return flat_of(parameter, name)[place.begin : place.end]

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of a piece, which may have one of passes that were settled before.

        ``gradient`` is flat.
        """
        piece, gradient = self.get(index), self.shaped(index, gradient)
        before = piece.grad
        piece.grad = gradient if before is None else before.add_(gradient)

    def zero_grad(self) -> None:
        """Take the gradients away."""
        for piece in self.tensors.values():
            piece.grad = None

    def follow_parameters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Make those anew whose parameters have other memory now; by the old, the new ones."""
        replaced: dict[torch.Tensor, torch.Tensor] = {}
        for index, old in list(self.tensors.items()):
            if self._addresses[index] != self._parameters.tensors[index].data_ptr():
                new = self._make(index)
                new.grad = old.grad
                replaced[old] = new
        return replaced

    def _make(self, index: int) -> torch.Tensor:
        piece = self.tensors[index] = self.shaped(index, self.flat(index)).requires_grad_()
        self._addresses[index] = self._parameters.tensors[index].data_ptr()
        return piece


class Cut:
    """The pieces into which the ranks of one world cut parameters, and this rank's own."""

    def __init__(
        self, parameters: Parameters, world: WorldLike | None = None, *, has_copies: bool = False
    ) -> None:
        """``world``: None where nothing is cut. ``has_copies``: each part is on a second rank."""
        self.own, self.copy = Pieces(parameters), Pieces(parameters)
        self.epoch: int | None = None
        """The epoch of its world; None where nothing is cut, or no launcher knows the ranks."""
        self.size = 1 if world is None else world.size
        self.rank = 0 if world is None else world.rank
        self.members: tuple[int, ...] = ()
        self.hosts: tuple[str, ...] = ()
        self.holders: list[int] = []
        """The rank that has the copy of each rank's part; empty: there are no copies."""
        self.copied = -1
        """The rank whose copy this one has."""
        if isinstance(world, World):  # of which nothing is kept that holds its engine
            self.epoch, self.members, self.hosts = world.epoch, world.members, world.hosts
        if has_copies and self.size > 1:
            self.holders = copied_by(self.hosts)
            self.copied = self.holders.index(self.rank)

    @property
    def stamp(self) -> tuple[int, tuple[int, ...]] | None:
        """A mark that tells it from other worlds' cuts, on all ranks alike; None: nothing cut."""
        return None if self.epoch is None else (self.epoch, self.members)

    def take(self, part: Part) -> None:
        """Add the pieces of this rank, and those that it has copies of."""
        self.own.take(part.pieces)
        if self.holders:
            self.copy.take(part.pieces_of(self.copied))

    def both(self) -> tuple[Pieces, Pieces]:
        """The rank's own pieces, and the copies."""
        return self.own, self.copy

    def of(self, index: int, begin: int) -> Pieces:
        """Return the ``Pieces`` that hold the piece of a parameter that begins with an element."""
        place = self.own.places.get(index)
        return self.own if place is not None and place.begin == begin else self.copy

    def tensors(self) -> Iterator[torch.Tensor]:
        """All pieces that were asked for, copies as well."""
        for pieces in self.both():
            yield from pieces.tensors.values()

    def lost(self, members: Sequence[int]) -> str:
        """Return the message about parts that no one of ``members`` has; "" where they have all."""
        gone = orphans(self.holders, self.members, members)
        return said_of(gone, self.holders, self.hosts, self.epoch)


def flat_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """All elements of a parameter as they lie in memory, as a view without a gradient.

    Raises InvalidArgumentError where they have gaps, or lie in each other's place.
    """
    plain = parameter.detach()
    if plain.is_contiguous():
        return plain.view(-1)
    if not _is_dense(plain):
        raise FrontEndArgumentError(
            f"parameter '{name}' of shape {tuple(plain.shape)} has strides {plain.stride()}, so "
            "its elements are not one block of memory: shard_state needs that; use .contiguous()"
        )
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements, in some order of the dimensions, are one block of memory."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != length:
                return False
            length *= size
    return True


def laid_as(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of ``tensor`` in the order in which the parameter's lie in memory."""
    plain = tensor.detach()
    if plain.stride() != parameter.stride():
        laid = torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=plain.dtype, device=plain.device
        )
        plain = laid.copy_(plain)
    if plain.is_contiguous():
        return plain.view(-1)
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def shaped_as(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The inverse of ``laid_as``: ``flat`` with the shape and the strides of ``parameter``."""
    return torch.as_strided(flat, parameter.shape, parameter.stride(), flat.storage_offset())


def joined(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """``flats`` one after the other; one alone as it is."""
    return flats[0] if len(flats) == 1 else torch.cat(list(flats))
