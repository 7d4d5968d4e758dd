"""Who keeps which part of the parameters, and how gradients and parameters travel between them.

ZeRO's first stage (Rajbhandari et al., 2020): each rank gets the sum of a part of the gradients,
steps with that part of the parameters alone, and ranks gather what they have stepped. A part is a
range of elements, so that ranks have equally many: of a large parameter, or of small ones in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kolovod.core.handles import Handle
from kolovod.core.submission import Request, Submitter
from kolovod.core.verbs import ALLGATHER, REDUCESCATTER
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.in_flight import InFlight, handled
from kolovod.gradients.plan import ALONE_BYTES
from kolovod.gradients.spec import ReduceSpec
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, Cargo, Item
from kolovod.torch.frontend import DTYPES, TorchFrontend, refusal
from kolovod.torch.parameters import Parameters


@dataclass(frozen=True)
class Piece:
    """What this rank has of one parameter."""

    index: int
    begin: int
    end: int
    """Elements of the flat parameter."""
    at: int
    """Where it begins in what this rank has of the part."""


@dataclass(frozen=True)
class Part:
    """Parameters in a row, of which each rank has a range of elements."""

    indices: list[int]
    count: int
    """Elements, of all ranks."""
    pieces: list[Piece]
    """Of this rank, in order."""

    @property
    def own(self) -> int:
        """Elements of this rank."""
        return sum(piece.end - piece.begin for piece in self.pieces)


def cut(indices: Sequence[int], sizes: Sequence[int], rank: int, size: int) -> Part:
    """The part of parameters of so many elements; as a reducescatter cuts them."""
    count = sum(sizes)
    least, more = divmod(count, size)
    begin = rank * least + min(rank, more)
    end = begin + least + (rank < more)
    pieces = []
    at = 0
    for index, length in zip(indices, sizes, strict=True):
        first, last = max(begin, at), min(end, at + length)
        if first < last:
            pieces.append(Piece(index, first - at, last - at, first - begin))
        at += length
    return Part(list(indices), count, pieces)


class ShardSender:
    """Scatters the sums of gradients: takes the place of ``Sender`` in a reducer."""

    keeps_buckets = True

    def __init__(
        self,
        parameters: Parameters,
        spec: ReduceSpec,
        verbs: TorchCollectives,
        in_flight: InFlight,
        check_new_world: Callable[[], None],
    ) -> None:
        """``check_new_world``: raises where state of an earlier world would be lost."""
        assert isinstance(verbs.frontend, TorchFrontend)
        self.device = verbs.frontend.device
        self.pieces: dict[int, torch.Tensor] = {}
        """By the parameter's index, views of what this rank has of it; with gradients of their own.
        Empty where ranks have not met."""
        self._parameters, self._spec = parameters, spec
        self.verbs, self._in_flight = verbs, in_flight
        self._frontend = verbs.frontend
        self._submitter = Submitter(verbs.world)
        self._check_new_world = check_new_world
        self._parts: dict[Bucket, list[Part]] = {}
        self._places: dict[int, Piece] = {}
        self._addresses: dict[int, int] = {}
        self._received: dict[int, torch.Tensor] = {}
        self._memory: dict[int, torch.Tensor] = {}

    def begin_world(self) -> None:
        """Ranks have agreed anew, and parts are cut anew."""
        self._check_new_world()
        self._parts.clear()
        for by_index in (self._places, self._addresses, self.pieces, self._received, self._memory):
            by_index.clear()

    def details(self, indices: Iterable[int]) -> list[tuple[str, Any]]:
        """What must be the same on all ranks: the order of elements in memory."""
        tensors, names = self._parameters.tensors, self._parameters.names
        return [(f"the strides of {names[i]}", tensors[i].stride()) for i in indices]

    def submit(
        self,
        bucket: Bucket,
        problems: list[InvalidArgumentError] | None = None,
        blank: bool = False,
    ) -> None:
        """Send a bucket: see ``Sends``."""
        if bucket.streams:
            self.device.follow(bucket.streams)
            bucket.streams.clear()
        items: list[Item] = []
        unused: list[int] = []
        flats: dict[int, torch.Tensor] = {}
        for index in bucket.indices:
            parameter = self._parameters.tensors[index]
            own = None if blank else parameter.grad
            try:
                flat = None if own is None else self._flat_gradient(index, own)
            except InvalidArgumentError as error:
                if problems is None:
                    raise
                problems.append(error)
                flat = None
            if own is None:
                unused.append(index)
            if flat is None:
                flat = torch.zeros(
                    parameter.numel(), dtype=parameter.dtype, device=parameter.device
                )
            flats[index] = flat
            items.append((index, own, 0 if own is None else own._version, flat, None))
        parts = self._parts_of(bucket)
        sent = [_joined([flats[index] for index in part.indices]) for part in parts]
        memory = [self._memory_of(part, flat) for part, flat in zip(parts, sent, strict=True)]
        spec = self._spec
        request = Request(REDUCESCATTER, bucket.name, None, spec.op, spec.prescale, spec.postscale)
        handle = self._into(request, sent, memory)
        take = partial(self._take, parts)
        self._in_flight.add(handled(handle, take, Cargo(bucket, items, [])))
        bucket.is_sent = True
        bucket.items, bucket.unused = items, unused

    def store(
        self, done: Sequence[Item], is_used: Callable[[int], bool], scale_of_sum: float
    ) -> None:
        """Pieces get their gradients, and parameters lose theirs, which are this rank's only."""
        for index, *_ in done:
            received = self._received.pop(index, None)
            if received is not None:
                piece = self._piece(index)
                if is_used(index):
                    before = piece.grad  # of passes that were settled before
                    piece.grad = received if before is None else before.add_(received)
            self._parameters.tensors[index].grad = None

    def pieces_of(self, ids: set[int]) -> list[torch.Tensor]:
        """See ``clipping.Shards``."""
        tensors = self._parameters.tensors
        return [piece for index, piece in self.pieces.items() if id(tensors[index]) in ids]

    def is_of(self, parameter: torch.Tensor) -> bool:
        """See ``clipping.Shards``."""
        return any(tensor is parameter for tensor in self._parameters.tensors)

    def combined(self, value: torch.Tensor, op: int) -> torch.Tensor:
        """See ``clipping.Shards``."""
        return self.verbs.allreduce(value, "norm of gradients", op)

    def zero_grad(self) -> None:
        """Pieces have no gradients."""
        for piece in self.pieces.values():
            piece.grad = None

    def follow_parameters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Make pieces anew of parameters that have other memory now; by the old, the new ones."""
        replaced: dict[torch.Tensor, torch.Tensor] = {}
        for index, old in list(self.pieces.items()):
            if self._addresses[index] != self._parameters.tensors[index].data_ptr():
                new = self._make_piece(index)
                new.grad = old.grad
                replaced[old] = new
        return replaced

    def _piece(self, index: int) -> torch.Tensor:
        return self.pieces[index] if index in self.pieces else self._make_piece(index)

    def _make_piece(self, index: int) -> torch.Tensor:
        parameter, place = self._parameters.tensors[index], self._places[index]
        flat = flat_of(parameter, self._parameters.names[index])
        piece = self.pieces[index] = flat[place.begin : place.end].requires_grad_()
        self._addresses[index] = parameter.data_ptr()
        return piece

    def own_of(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Of a tensor that has the shape of a parameter, what belongs to this rank's piece."""
        place = self._places[index]
        parameter = self._parameters.tensors[index]
        return _like(parameter, whole)[place.begin : place.end].clone()

    def all_parts(self) -> Iterator[tuple[str, Part]]:
        """By the name of the bucket and the place in it."""
        for bucket, parts in self._parts.items():
            for number, part in enumerate(parts):
                yield f"{bucket.name}.{number}", part

    def gather(self) -> list[tuple[list[torch.Tensor], Callable[[], None]]]:
        """Send what this rank has stepped. Returns parameters, and what waits for them.

        First what forward is likely to use first, whose gradients backward makes last.
        """
        tensors = self._parameters.tensors
        return [
            ([tensors[index] for index in bucket.indices], self._gather(bucket, parts))
            for bucket, parts in reversed(self._parts.items())
        ]

    def gathered(self, name: str, part: Part, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of values of the pieces of ``part``, those of the whole parameters, on all ranks.

        ``own``: by piece, or one empty tensor where this rank has none.
        """
        whole = self.verbs.allgather(_joined(list(own)), name)
        tensors = self._parameters.tensors
        sizes = [tensors[index].numel() for index in part.indices]
        parts = whole.split(sizes)  # type: ignore[no-untyped-call]
        return [
            torch.as_strided(flat, tensors[i].shape, tensors[i].stride(), flat.storage_offset())
            for i, flat in zip(part.indices, parts, strict=True)
        ]

    def _gather(self, bucket: Bucket, parts: list[Part]) -> Callable[[], None]:
        tensors, names = self._parameters.tensors, self._parameters.names
        own, wholes = [], []
        for part in parts:
            pieces = [self._piece(piece.index).detach() for piece in part.pieces]
            like = tensors[part.indices[0]]
            own.append(_joined(pieces) if pieces else like.new_empty(0))
            is_alone = len(part.indices) == 1
            wholes.append(
                flat_of(like, names[part.indices[0]]) if is_alone else like.new_empty(part.count)
            )
        handle = self._into(Request(ALLGATHER, f"parameters of {bucket.name}"), own, wholes)

        @torch.no_grad()
        def wait() -> None:
            for part, result, whole in zip(parts, handle.wait(), wholes, strict=True):
                if len(part.indices) == 1:
                    if result is not whole:
                        whole.copy_(result)
                    continue
                sizes = [tensors[index].numel() for index in part.indices]
                flats = [flat_of(tensors[index], names[index]) for index in part.indices]
                torch._foreach_copy_(flats, result.split(sizes))  # type: ignore[no-untyped-call]

        return wait

    def _into(
        self, request: Request, sources: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> Handle[list[torch.Tensor]]:
        """Results in ``outputs`` where the engine can write them there, else in tensors anew."""
        views = [self._frontend.view(tensor) for tensor in sources]
        if not all(
            view[3] is tensor and tensor.is_cpu and not self.device.is_on_device(tensor)
            for view, tensor in zip(views, sources, strict=True)
        ):
            return self.verbs.start_new_group(request, sources)
        entries = [
            (code, shape, address, output.data_ptr())
            for (code, shape, address, _), output in zip(views, outputs, strict=True)
        ]
        return self._submitter.start(
            request,
            entries,
            (sources, outputs),
            outputs,
            out_bytes=[output.numel() * output.element_size() for output in outputs],
        )

    def _memory_of(self, part: Part, like: torch.Tensor) -> torch.Tensor:
        """For what this rank gets of a part: the same in each step, unless it is in use."""
        first = part.indices[0]
        kept = self._memory.get(first)
        pieces = (self.pieces.get(piece.index) for piece in part.pieces)
        if kept is None or any(piece is not None and piece.grad is not None for piece in pieces):
            kept = self._memory[first] = like.new_empty(part.own)
        return kept

    def _parts_of(self, bucket: Bucket) -> list[Part]:
        known = self._parts.get(bucket)
        if known is not None:
            return known
        tensors = self._parameters.tensors
        world = self.verbs.world()
        rows: list[list[int]] = []
        small: list[int] = []
        for index in bucket.indices:
            flat_of(tensors[index], self._parameters.names[index])  # which says if that is not so
            is_small = tensors[index].numel() * tensors[index].element_size() < ALONE_BYTES
            (small.append(index) if is_small else rows.append([index]))
        parts = [
            cut(row, [tensors[index].numel() for index in row], world.rank, world.size)
            for row in ([*rows, small] if small else rows)
        ]
        self._parts[bucket] = parts
        self._places.update((piece.index, piece) for part in parts for piece in part.pieces)
        return parts

    def _take(self, parts: list[Part], results: list[torch.Tensor]) -> None:
        for part, result in zip(parts, results, strict=True):
            for piece in part.pieces:
                end = piece.at + piece.end - piece.begin
                self._received[piece.index] = result[piece.at : end]

    def _flat_gradient(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        parameter, name = self._parameters.tensors[index], self._parameters.names[index]
        if grad.is_sparse and self._spec.sparse_as_dense:
            grad = grad.to_dense()
        if grad.is_sparse:
            raise InvalidArgumentError(
                f"gradient of '{name}' is sparse, which shard_state cannot scatter: pass "
                "sparse_as_dense=True"
            )
        if grad.dtype not in DTYPES:
            raise InvalidArgumentError(f"gradient of '{name}': {refusal(grad.dtype)}")
        return _like(parameter, grad)


def flat_of(parameter: torch.Tensor, name: str) -> torch.Tensor:
    """All elements of a parameter as they lie in memory, as a view without a gradient.

    Raises InvalidArgumentError where they have gaps, or lie in each other's place.
    """
    plain = parameter.detach()
    if plain.is_contiguous():
        return plain.view(-1)
    if not _is_dense(plain):
        raise InvalidArgumentError(
            f"parameter '{name}' of shape {tuple(plain.shape)} has strides {plain.stride()}, so "
            "its elements are not one block of memory: shard_state needs that; use .contiguous()"
        )
    return plain.as_strided((plain.numel(),), (1,), plain.storage_offset())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements, in some order of the dimensions, are one block of memory."""
    length = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != length:
                return False
            length *= size
    return True


def _like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
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


def _joined(flats: list[torch.Tensor]) -> torch.Tensor:
    return flats[0] if len(flats) == 1 else torch.cat(flats)
