"""The state of a sharded optimizer on its way to other ranks, when an elastic job's world changes.

Ranks tell each other what they have of the state, and follow from that who sends what to whom
(``gradients/holders.py``). Then it goes there, some parameters at a time, so that a rank never has
more than its own parts of before and after, and what one batch holds. What a rank has had it keeps
until all ranks have what they need.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kolovod.core.objects import Objects
from kolovod.core.world import World
from kolovod.errors import InternalError, JobOverError
from kolovod.gradients.holders import Held, Move, Span, moves
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.pieces import Cut, joined, laid_as, shaped_as

if TYPE_CHECKING:
    from kolovod.torch.copied_shards import CopiedShards

State = dict[Any, Any]

_BATCH_BYTES = 32 << 20
"""The bytes of the whole tensors that travel in one operation; a rank has its parts of them."""
_GRADIENT = "kolovod.gradient"
"""A gradient that is averaged and not stepped with yet travels like the state, under this key."""


class Values(NamedTuple):
    """The state of one parameter's span that a rank has, or shall have."""

    span: Span
    by_element: dict[str, torch.Tensor]
    """Tensors by key; flat, but for what ``whole`` returns."""
    once: dict[str, Any]
    """Values that are the same for all elements."""


class Job(NamedTuple):
    """Something that a parameter has a value of for each element."""

    parameter: int
    key: str
    dtype: torch.dtype


class _Outline(NamedTuple):
    """The outline of its state that a rank tells the others."""

    stamp: tuple[int, tuple[int, ...]] | None
    lost: str
    spans: list[Held]
    kinds: dict[int, dict[str, torch.dtype]]
    once: dict[int, dict[str, Any]]


class _OnDevice(NamedTuple):
    """A value that belongs on the device of its parameter."""

    value: torch.Tensor


def is_by_element(value: Any, like: torch.Tensor) -> bool:
    """Return whether ``value`` has a number for each element of ``like``.

    For a parameter without dimensions all numbers count as such, its step, too: pieces have one.
    """
    return isinstance(value, torch.Tensor) and value.shape == like.shape


def exchange(
    verbs: TorchCollectives,
    jobs: Sequence[Job],
    found: Mapping[int, Sequence[Move]],
    read: Callable[[Job, int, int], torch.Tensor],
    write: Callable[[Job, int, int, torch.Tensor], None],
    tensors: Sequence[torch.Tensor],
) -> None:
    """Send what ``found`` says of each job, which is the same on all ranks.

    ``read(job, begin, end)``: the elements as this rank has them, flat; ``write(job, begin, end,
    values)`` gets those that it needs. ``tensors``: the parameters, by index.
    """
    for batch in _batches(jobs, tensors):
        _exchange_batch(verbs, batch, found, read, write, tensors[batch[0].parameter].device)


def _batches(jobs: Sequence[Job], tensors: Sequence[torch.Tensor]) -> Iterator[list[Job]]:
    """Yield the jobs in batches, each of one dtype and one kind of device."""
    kinds: dict[tuple[torch.dtype, str], list[Job]] = defaultdict(list)
    for job in jobs:
        kinds[job.dtype, tensors[job.parameter].device.type].append(job)
    for same in kinds.values():
        batch: list[Job] = []
        batch_bytes = 0
        for job in same:
            batch.append(job)
            batch_bytes += tensors[job.parameter].numel() * job.dtype.itemsize
            if batch_bytes >= _BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
        if batch:
            yield batch


def _exchange_batch(
    verbs: TorchCollectives,
    batch: Sequence[Job],
    found: Mapping[int, Sequence[Move]],
    read: Callable[[Job, int, int], torch.Tensor],
    write: Callable[[Job, int, int, torch.Tensor], None],
    device: torch.device,
) -> None:
    world = verbs.world()
    rank, size = world.rank, world.size
    sent: list[list[torch.Tensor]] = [[] for _ in range(size)]
    expected: list[list[tuple[Job, Move]]] = [[] for _ in range(size)]
    travels = False
    for job in batch:
        for move in found.get(job.parameter, ()):
            travels |= move.source != move.target
            if move.source == move.target == rank:
                write(job, move.begin, move.end, read(job, move.begin, move.end))
            elif move.source == rank:
                sent[move.target].append(read(job, move.begin, move.end))
            elif move.target == rank:
                expected[move.source].append((job, move))
    if not travels:  # on any rank
        return
    splits = [sum(values.numel() for values in row) for row in sent]
    everything = [values for row in sent for values in row]
    dtype = batch[0].dtype
    source = joined(everything) if everything else torch.empty(0, dtype=dtype, device=device)
    first = batch[0]
    received, _ = verbs.alltoall(
        source.contiguous(), splits, f"shards.{first.parameter}.{first.key}.{dtype}"
    )
    at = 0
    for job, move in (pair for row in expected for pair in row):
        length = move.end - move.begin
        write(job, move.begin, move.end, received[at : at + length])
        at += length


def _sources(
    state: State, sender: CopiedShards
) -> Iterator[tuple[Held, torch.Tensor, dict[str, Any]]]:
    """Yield this rank's state of the trained parameters: span, the tensor it is like, entries."""
    for pieces in sender.cut.both():
        is_copy = pieces is sender.cut.copy
        for index, piece in pieces.tensors.items():
            place = pieces.places[index]
            entries = dict(state.get(piece) or {})
            if piece.grad is not None:
                entries[_GRADIENT] = piece.grad
            yield Held(index, place.begin, place.end, is_copy), piece, entries
    for index, parameter in enumerate(sender.parameters.tensors):
        if state.get(parameter):
            yield Held(index, 0, parameter.numel(), False), parameter, state[parameter]


def _outline(state: State, sender: CopiedShards) -> _Outline:
    world = sender.verbs.world()
    assert isinstance(world, World)
    spans: list[Held] = []
    kinds: dict[int, dict[str, torch.dtype]] = {}
    once: dict[int, dict[str, Any]] = {}
    for held, tensor, entries in _sources(state, sender):
        spans.append(held)
        for key, value in entries.items():
            if is_by_element(value, tensor):
                kinds.setdefault(held.parameter, {})[key] = value.dtype
            else:
                is_far = isinstance(value, torch.Tensor) and not value.is_cpu
                said = _OnDevice(value.cpu()) if is_far else value
                once.setdefault(held.parameter, {})[key] = said
    cut = sender.cut
    lost = "" if cut.epoch is None else cut.lost(world.members)
    return _Outline(cut.stamp, lost, spans, kinds, once)


def collected(
    state: State, sender: CopiedShards, need: Callable[[int], Iterable[Span]]
) -> list[Values]:
    """Return the state that this rank needs; all ranks call it, and those that have it send it.

    ``need(rank)``: the spans that a rank of the current world needs. It takes the state of the
    ranks that have stepped with rank 0, or where nothing is in parts that of rank 0. Raises
    JobOverError, on all ranks, where nobody has a part any more.
    """
    verbs, tensors = sender.verbs, sender.parameters.tensors
    world = verbs.world()
    everyone = Objects(verbs.world).allgather_object(_outline(state, sender), "shards.outline")
    stamp = everyone[0].stamp
    nothing = _Outline(None, "", [], {}, {})
    outlines: list[_Outline] = [
        said if rank == 0 or (stamp is not None and said.stamp == stamp) else nothing
        for rank, said in enumerate(everyone)
    ]
    kinds: dict[int, dict[str, torch.dtype]] = {}
    once: dict[int, dict[str, Any]] = {}
    for said in reversed(outlines):  # so that the lowest rank's counts
        for index, of_index in said.kinds.items():
            kinds.setdefault(index, {}).update(of_index)
        for index, values in said.once.items():
            once.setdefault(index, {}).update(values)
    known = kinds.keys() | once.keys()
    if known and outlines[0].lost:
        raise JobOverError(outlines[0].lost)
    wanted = [
        [span for span in need(rank) if span.parameter in known] for rank in range(world.size)
    ]
    found, missing = moves([said.spans for said in outlines], wanted)
    if missing:
        name = sender.parameters.names[missing[0].parameter]
        raise InternalError(
            f"no rank has elements {missing[0].begin} to {missing[0].end} of the optimizer's state "
            f"of '{name}' (cut: {stamp}; ranks now: {world.size}): please report it"
        )
    got = [_room(span, kinds, once, tensors[span.parameter]) for span in wanted[world.rank]]
    by_index: dict[int, list[Values]] = defaultdict(list)
    for values in got:
        by_index[values.span.parameter].append(values)

    def read(job: Job, begin: int, end: int) -> torch.Tensor:
        return _read(state, sender, job, begin, end)

    def write(job: Job, begin: int, end: int, received: torch.Tensor) -> None:
        for values in by_index[job.parameter]:
            if values.span.begin <= begin and end <= values.span.end:
                place = slice(begin - values.span.begin, end - values.span.begin)
                values.by_element[job.key][place].copy_(received)

    jobs = [Job(i, key, dtype) for i in sorted(kinds) for key, dtype in sorted(kinds[i].items())]
    with torch.no_grad():
        exchange(verbs, jobs, found, read, write, tensors)
    return got


def _room(
    span: Span,
    kinds: Mapping[int, Mapping[str, torch.dtype]],
    once: Mapping[int, Mapping[str, Any]],
    parameter: torch.Tensor,
) -> Values:
    """Return tensors for the state of a span that is to be received."""
    length = span.end - span.begin
    by_element = {
        key: torch.empty(length, dtype=dtype, device=parameter.device)
        for key, dtype in kinds.get(span.parameter, {}).items()
    }
    alone = {
        key: value.value.to(parameter.device, copy=True)
        if isinstance(value, _OnDevice)
        else copy.deepcopy(value)  # a step is counted in each by itself
        for key, value in once.get(span.parameter, {}).items()
    }
    return Values(span, by_element, alone)


def _read(state: State, sender: CopiedShards, job: Job, begin: int, end: int) -> torch.Tensor:
    """Return elements that this rank has; zeros where it has nothing of that key."""
    for held, tensor, entries in _sources(state, sender):
        if held.parameter == job.parameter and held.begin <= begin and end <= held.end:
            value = entries.get(job.key)
            if value is None:
                return torch.zeros(end - begin, dtype=job.dtype, device=tensor.device)
            flat = laid_as(tensor, value)
            return flat[begin - held.begin : end - held.begin]
    raise InternalError(f"elements {begin} to {end} of parameter {job.parameter} are not here")


def to_next_cut(state: State, sender: CopiedShards) -> Callable[[], None]:
    """Get what this rank has to have in ``sender.next``; what is returned makes that the cut."""
    after = sender.next
    got = collected(state, sender, sender.spans)

    def commit() -> None:
        forget(state, sender)
        sender.cut = after
        for span, by_element, once in got:
            pieces = after.of(span.parameter, span.begin)
            piece = pieces.get(span.parameter)
            values = {key: pieces.shaped(span.parameter, v) for key, v in by_element.items()}
            piece.grad = values.pop(_GRADIENT, None)
            if values or once:
                state[piece] = {**values, **once}

    return commit


def whole(state: State, sender: CopiedShards) -> dict[int, Values]:
    """Return, by index, the state of whole parameters, on all ranks, shaped like these."""
    tensors = sender.parameters.tensors
    everything = [Span(index, 0, tensor.numel()) for index, tensor in enumerate(tensors)]
    found: dict[int, Values] = {}
    for span, by_element, once in collected(state, sender, lambda rank: everything):
        shaped = {key: shaped_as(tensors[span.parameter], flat) for key, flat in by_element.items()}
        found[span.parameter] = Values(span, shaped, once)
    return found


def to_whole(state: State, sender: CopiedShards) -> None:
    """Keep the state by whole parameters, being alone. Raises JobOverError for lost parts."""
    tensors = sender.parameters.tensors
    sender.heed()
    got = whole(state, sender)
    forget(state, sender)
    sender.zero_grad()
    sender.cut = sender.next = Cut(sender.parameters)
    for index, (_, by_element, once) in got.items():
        averaged = by_element.pop(_GRADIENT, None)
        own = sender.parameters.grad(index)
        if averaged is not None:
            tensors[index].grad = averaged if own is None else own.add_(averaged)
        if by_element or once:
            state[tensors[index]] = {**by_element, **once}


def forget(state: State, sender: CopiedShards) -> None:
    """Drop what is kept of trained parameters, whole or in pieces."""
    for tensor in (*sender.cut.tensors(), *sender.parameters.tensors):
        state.pop(tensor, None)
