"""Parts of the parameters, one for each rank, and how gradients and parameters travel between them.

ZeRO's first stage (Rajbhandari et al., 2020): each rank gets the sum of a part of the gradients,
steps with that part of the parameters alone, and ranks gather what they have stepped. A part is a
range of elements, so that ranks have equally many: of a large parameter, or of small ones in a row.
Where the optimizer needs whole tensors, each is one rank's (``gradients/owners.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kolovod.core.handles import Handle
from kolovod.core.submission import EngineTensor, Request, Submitter
from kolovod.core.transaction import transaction
from kolovod.core.verbs import ALLGATHER, REDUCESCATTER
from kolovod.errors import FrontEndArgumentError, InvalidArgumentError
from kolovod.gradients.in_flight import Flight, InFlight, handled
from kolovod.gradients.owners import Owners
from kolovod.gradients.plan import ALONE_BYTES
from kolovod.gradients.spec import ReduceSpec
from kolovod.gradients.stager import Event, Queued, stager
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, InFlightBucket, Item, Sends
from kolovod.torch.frontend import AVERAGED, TorchFrontend, refusal
from kolovod.torch.in_parts import Marks
from kolovod.torch.parameters import Parameters
from kolovod.torch.pieces import Cut, OwnedPart, Part, Pieces, flat_of, joined, laid_as, shaped_as

_FOREVER = -1.0


class ShardSender(Sends):
    """Scatters the sums of gradients: takes the place of ``Sender`` in a reducer."""

    keeps_buckets = True

    def __init__(
        self,
        parameters: Parameters,
        spec: ReduceSpec,
        verbs: TorchCollectives,
        in_flight: InFlight,
        check_new_world: Callable[[], None],
        wholes: set[int],
    ) -> None:
        """``check_new_world``: raises where state of an earlier world would be lost.

        ``wholes``: the ``id`` of the parameters that one rank steps with as a whole.
        """
        assert isinstance(verbs.frontend, TorchFrontend)
        self.device = verbs.frontend.device
        self.cut = Cut(parameters)
        """The cut by which the optimizer's state is kept: in an elastic job the last step's."""
        self.next = self.cut
        """The cut of the ranks that have met; in an elastic job ``cut`` once all have stepped."""
        self.in_parts = False
        """Gradients are averaged, and each rank has those of its pieces."""
        self._marks = Marks(parameters, self.zero)
        self.wholes = wholes
        self.parameters, self._spec = parameters, spec
        self.verbs, self._in_flight = verbs, in_flight
        self._frontend = verbs.frontend
        self._submitter = Submitter(verbs.world)
        self._check_new_world = check_new_world
        self._owners = Owners(1, {})
        self._parts: dict[Bucket, list[Part]] = {}
        self._received: dict[int, torch.Tensor] = {}
        self._memory: dict[int, torch.Tensor] = {}

    def begin_world(self) -> None:
        """Begin anew: ranks have agreed, and parts are cut anew."""
        self._check_new_world()
        if not transaction().is_elastic:
            self._marks.take_off()
        self._parts.clear()
        self._received.clear()
        self._memory.clear()
        self.next = Cut(self.parameters, self.verbs.world(), has_copies=transaction().is_elastic)
        if not transaction().is_elastic:
            self.cut = self.next

    def details(self, indices: Iterable[int]) -> list[tuple[str, Any]]:
        """Return the strides: all ranks must have the same order of elements in memory.

        And they must cut the same parameters into pieces.
        """
        tensors, names = self.parameters.tensors, self.parameters.names
        said: list[tuple[str, Any]] = []
        for index in indices:
            said.append((f"the strides of {names[index]}", tensors[index].stride()))
            said.append((f"one rank steps with all of {names[index]}", self._is_whole(index)))
        return said

    def together(self, order: Sequence[int], bucket_bytes: int) -> list[list[int]]:
        """Return groups of the parameters in ``order`` that one rank each steps with as a whole.

        That of all parameters begins a world: it says who has which.
        """
        kinds: dict[Any, list[int]] = defaultdict(list)
        for index in filter(self._is_whole, order):
            tensor = self.parameters.tensors[index]
            kinds[tensor.dtype, tensor.device].append(index)
        elements = {i: self.parameters.tensors[i].numel() for same in kinds.values() for i in same}
        if len(order) == len(self.parameters):
            self._owners = Owners(self.verbs.world().size, elements)
        else:
            self._owners.add(elements)
        return [
            group
            for (dtype, _), same in kinds.items()
            for group in self._owners.together(same, bucket_bytes // dtype.itemsize)
        ]

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
            parameter = self.parameters.tensors[index]
            own = None if blank or index in self.parameters.lent else self.parameters.grad(index)
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
        sent = [part.to_scatter([flats[index] for index in part.indices]) for part in parts]
        memory = [self._memory_of(part, flat) for part, flat in zip(parts, sent, strict=True)]
        spec = self._spec
        request = Request(REDUCESCATTER, bucket.name, None, spec.op, spec.prescale, spec.postscale)
        take, in_flight = partial(self._take, parts), InFlightBucket(bucket, items, [])
        if all(map(self.device.is_on_device, sent)) and not self._frontend.is_direct():
            self._stage(request, sent, memory, take, in_flight)
        else:
            self._in_flight.add(handled(self._into(request, sent, memory), take, in_flight))
        bucket.is_sent = True
        bucket.items, bucket.unused = items, unused

    def _stage(
        self,
        request: Request,
        sent: list[torch.Tensor],
        memory: list[torch.Tensor],
        take: Callable[[list[torch.Tensor]], None],
        in_flight: InFlightBucket,
    ) -> None:
        """Enqueue the copies to pinned memory: a thread submits when they are there (``Sender``).

        Results are brought to ``memory``, on the GPU, when they are waited for.
        """
        entries: list[EngineTensor] = []
        events: list[Event] = []
        pinned: list[torch.Tensor] = []
        for flat, own in zip(sent, memory, strict=True):
            there = self.device.pinned(flat.numel(), flat.dtype)
            back = self.device.pinned(own.numel(), own.dtype)
            with self.device.beside(flat, {self.device.stream_of(flat)}):
                self.device.pack([flat], there)
                events.append(self.device.mark(flat, sleeps=True))
            entries.append((AVERAGED[flat.dtype], flat.shape, there.data_ptr(), back.data_ptr()))
            pinned.append(there)
            in_flight.copied.append((back, [own]))
        engine = self.verbs.world().engine
        submit = partial(
            engine.submit,
            request.verb.number,
            request.name or "",
            entries,
            int(request.op),
            request.prescale,
            request.postscale,
            0,
            False,
            (),
            [back.nbytes for back, _ in in_flight.copied],
        )
        queued = Queued(events, submit, engine, (in_flight, sent, pinned))
        stager.put(queued)

        def wait() -> None:
            engine.wait(queued.number(), _FOREVER)
            take(memory)

        self._in_flight.add(Flight(in_flight, wait, queued.let_go, is_staged=True))

    def store(
        self, done: Sequence[Item], is_used: Callable[[int], bool], scale_of_sum: float
    ) -> None:
        """Give pieces their gradients, and parameters a mark: theirs were this rank's only."""
        for index, *_ in done:
            received = self._received.pop(index, None)
            if received is not None:
                self.cut.own.get(index)
                if is_used(index):
                    self.cut.own.add(index, received)
            if index not in self.parameters.lent:
                if index in self._marks or is_used(index):
                    self._marks.put(index)
                else:
                    self.parameters.tensors[index].grad = None
        self.in_parts = True

    def before_backward(self, index: int) -> None:
        """Forget the averaged gradient that the script has taken away, or replaced."""
        if self._marks.is_changed(index):
            self._marks.forget(index)
            self._give(index, None)

    def heed(self) -> None:
        """Do with the pieces what the script did with gradients after they were averaged.

        It may have taken some away, and given parameters others.
        """
        for index in self._marks.changed():
            own = self.parameters.tensors[index].grad
            self._give(index, own)
            if own is None:
                self._marks.forget(index)
            else:
                self._marks.put(index)

    def zero(self, index: int) -> None:
        """Make the gradient of a parameter zeros."""
        for pieces in self.cut.both():
            piece = pieces.tensors.get(index)
            if piece is not None and piece.grad is not None:
                piece.grad.zero_()

    def _give(self, index: int, whole: torch.Tensor | None) -> None:
        """Let the pieces of a parameter have the gradient ``whole``, which is shaped as that is."""
        for pieces in self.cut.both():
            piece = pieces.tensors.get(index)
            if piece is not None:
                piece.grad = None if whole is None else pieces.own_of(index, whole)

    def pieces_of(self, ids: set[int]) -> list[torch.Tensor]:
        """Return this rank's pieces of the parameters with these values of ``id``."""
        self.heed()
        tensors = self.parameters.tensors
        both = (pieces.tensors.items() for pieces in self.cut.both())
        return [piece for some in both for index, piece in some if id(tensors[index]) in ids]

    def is_of(self, parameter: torch.Tensor) -> bool:
        """Return whether ranks have pieces of ``parameter``."""
        return any(tensor is parameter for tensor in self.parameters.tensors)

    def combined(
        self, ids: set[int], measure: Callable[[list[torch.Tensor]], torch.Tensor], op: int
    ) -> torch.Tensor:
        """Return ``op`` over ``measure(pieces)`` of each rank's pieces of these parameters."""
        tensors = self.parameters.tensors

        def attempt() -> torch.Tensor:
            counted = [
                piece
                for pieces in self.counted()
                for index, piece in pieces.tensors.items()
                if id(tensors[index]) in ids
            ]
            return self.verbs.allreduce(measure(counted), "norm of gradients", op)

        return transaction().run(attempt)

    def counted(self) -> list[Pieces]:
        """Return pieces of which all ranks together have each element once."""
        return [self.cut.own]

    def zero_grad(self) -> None:
        """Take the pieces' gradients away."""
        self.in_parts = False
        self._marks.take_off()
        for pieces in self.cut.both():
            pieces.zero_grad()

    def pieces(self) -> dict[int, list[torch.Tensor]]:
        """Return, by a parameter's ``id``, the pieces that the optimizer steps with instead."""
        tensors = self.parameters.tensors
        found: dict[int, list[torch.Tensor]] = {}
        for pieces in self.cut.both():
            for index, piece in pieces.tensors.items():
                found.setdefault(id(tensors[index]), []).append(piece)
        return found

    def all_parts(self) -> Iterator[tuple[str, Part]]:
        """Yield each part with its name: that of its bucket, and its place in it."""
        for bucket, parts in self._parts.items():
            for number, part in enumerate(parts):
                yield f"{bucket.name}.{number}", part

    def gather(self) -> list[tuple[list[torch.Tensor], Callable[[], None]]]:
        """Send what this rank has stepped. Returns parameters, and what waits for them.

        First what forward is likely to use first, whose gradients backward makes last.
        """
        tensors = self.parameters.tensors
        return [
            ([tensors[index] for index in bucket.indices], self._gather(bucket, parts))
            for bucket, parts in reversed(self._parts.items())
        ]

    def gathered(self, name: str, part: Part, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather values of the pieces of ``part``: those of the whole parameters, on all ranks.

        ``own``: by piece, or one empty tensor where this rank has none.
        """
        whole = self.verbs.allgather(joined(list(own)), name)
        tensors = self.parameters.tensors
        flats = whole.split(part.sizes)  # type: ignore[no-untyped-call]
        return [shaped_as(tensors[i], flat) for i, flat in zip(part.indices, flats, strict=True)]

    def _gather(self, bucket: Bucket, parts: list[Part]) -> Callable[[], None]:
        tensors, names = self.parameters.tensors, self.parameters.names
        own, wholes = [], []
        for part in parts:
            pieces = [self.cut.own.flat(piece.index) for piece in part.pieces]
            like = tensors[part.indices[0]]
            own.append(joined(pieces) if pieces else like.new_empty(0))
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
                flats = [flat_of(tensors[index], names[index]) for index in part.indices]
                torch._foreach_copy_(flats, result.split(part.sizes))  # type: ignore[no-untyped-call]

        return wait

    def _into(
        self, request: Request, sources: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> Handle[list[torch.Tensor]]:
        """Submit ``request``; results are ``outputs`` if the engine can write there, else new."""
        if any(map(self.device.is_on_device, sources)):  # a view would be a copy
            return self.verbs.start_new_group(request, sources)
        views = [self._frontend.view(tensor) for tensor in sources]
        if not all(view[3] is tensor for view, tensor in zip(views, sources, strict=True)):
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
        """Return memory for this rank's part: the same in each step, unless it is in use."""
        first = part.indices[0]
        kept = self._memory.get(first)
        pieces = (self.cut.own.tensors.get(piece.index) for piece in part.pieces)
        if kept is None or any(piece is not None and piece.grad is not None for piece in pieces):
            kept = self._memory[first] = like.new_empty(part.received)
        return kept

    def _parts_of(self, bucket: Bucket) -> list[Part]:
        known = self._parts.get(bucket)
        if known is not None:
            return known
        tensors = self.parameters.tensors
        world = self.verbs.world()
        rows: list[list[int]] = []
        small: list[int] = []
        wholes = [index for index in bucket.indices if self._is_whole(index)]
        for index in bucket.indices:
            flat_of(tensors[index], self.parameters.names[index])  # which says if that is not so
            if index not in wholes:
                is_small = tensors[index].numel() * tensors[index].element_size() < ALONE_BYTES
                (small.append(index) if is_small else rows.append([index]))
        parts = [
            Part(row, [tensors[index].numel() for index in row], world.rank, world.size)
            for row in ([*rows, small] if small else rows)
        ]
        if wholes:
            sizes = [tensors[index].numel() for index in wholes]
            parts.append(OwnedPart(wholes, sizes, self._owners, world.rank, world.size))
        self._parts[bucket] = parts
        for part in parts:
            self.next.take(part)
        return parts

    def _is_whole(self, index: int) -> bool:
        return id(self.parameters.tensors[index]) in self.wholes

    def _take(self, parts: list[Part], results: list[torch.Tensor]) -> None:
        for part, result in zip(parts, results, strict=True):
            for piece in part.pieces:
                end = piece.at + piece.end - piece.begin
                self._received[piece.index] = result[piece.at : end]

    def _flat_gradient(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        parameter, name = self.parameters.tensors[index], self.parameters.names[index]
        if grad.is_sparse and self._spec.sparse_as_dense:
            grad = grad.to_dense()
        if grad.is_sparse:
            raise FrontEndArgumentError(
                f"gradient of '{name}' is sparse, which shard_state cannot scatter: pass "
                "sparse_as_dense=True"
            )
        self._marks.check(index)
        if grad.dtype not in AVERAGED or grad.is_complex():
            raise FrontEndArgumentError(f"gradient of '{name}': {refusal(grad.dtype)}")
        return laid_as(parameter, grad)
