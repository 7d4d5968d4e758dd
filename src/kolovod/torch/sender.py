"""From a bucket's gradients to an operation of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from kolovod import _native
from kolovod.core.codecs import coded, tell_where_useless, with_codec
from kolovod.core.ops import Average, Sum
from kolovod.core.submission import EngineTensor, WorldLike
from kolovod.core.transaction import transaction
from kolovod.errors import FrontEndArgumentError, InvalidArgumentError, from_engine
from kolovod.gradients.compression import NOTHING, Compressor, InBlocks, payload_of
from kolovod.gradients.in_flight import InFlight, handled, staged, submitted
from kolovod.gradients.spec import ReduceSpec
from kolovod.gradients.stager import Event, Queued, stager
from kolovod.torch import results, sparse
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, EncodedGradient, InFlightBucket, Item, Sends, by_kind
from kolovod.torch.frontend import AVERAGED, TorchFrontend, code_of, is_plain_block
from kolovod.torch.parameters import Parameters
from kolovod.torch.spare import Spare

_ALLREDUCE = _native.VERBS["allreduce"]
_LATER = -1  # the address of a gradient on a GPU, until there is memory for its copy


class Sender(Sends):
    """Makes views of gradients, or what travels in their place, and submits them [2]."""

    def __init__(
        self,
        parameters: Parameters,
        spec: ReduceSpec,
        verbs: TorchCollectives,
        in_flight: InFlight,
    ) -> None:
        """``in_flight`` gets what is submitted."""
        assert isinstance(verbs.frontend, TorchFrontend)
        self.device = verbs.frontend.device
        self._spare = Spare()
        self._parameters = parameters
        self._codings: dict[int, int] = {}
        self._verbs = verbs
        self._frontend = verbs.frontend
        self._in_flight = in_flight
        self._spec = spec
        self.check: Callable[..., None] | None = None
        """``Sentinel.check``, for what is sent of a bucket that ``checks``."""
        self.use(spec.compressor)

    def checks(self, bucket: Bucket) -> bool:
        """Return whether the bucket's gradients are sent as they are, for ``check`` to see."""
        is_dense = not (bucket.sparse_dim or self._spec.sparse_as_dense)
        return self.check is not None and self._is_plain and is_dense

    def use(self, compressor: Compressor) -> None:
        """Send gradients by ``compressor`` from the next step on; all ranks do."""
        self._compressor = compressor
        self._blocks = compressor.blocks if isinstance(compressor, InBlocks) else None
        self._is_plain = compressor is NOTHING or self._blocks is not None
        self._codings.clear()

    def store(
        self, done: Sequence[Item], is_used: Callable[[int], bool], scale_of_sum: float
    ) -> None:
        """Put results where the optimizer looks for them, as ``Sends`` says."""
        results.store(self._parameters.tensors, done, is_used, scale_of_sum, self._spare)

    def submit(
        self,
        bucket: Bucket,
        problems: list[InvalidArgumentError] | None = None,
        blank: bool = False,
    ) -> None:
        """Send a bucket, as ``Sends`` says."""
        is_plain, parameters = self._is_plain, self._parameters.tensors
        lent = self._parameters.lent
        is_prepared = bucket.sparse_dim or self._spec.sparse_as_dense or not is_plain
        if bucket.streams and (is_prepared or self._frontend.is_direct()):
            self.device.follow(bucket.streams)  # what is made of gradients comes after them
            bucket.streams.clear()
        if bucket.sparse_dim:
            self._submit_sparse(bucket, blank)
            return
        keeps = transaction().keeps_gradients  # to be sent once more if a rank is lost
        is_usual = not (blank or lent or is_prepared) and self._blocks is None
        if is_usual and self._frontend.framework:
            usual = _native.plain_gradients(parameters, bucket.indices)
        else:
            usual = None
        if usual is not None:
            self._launch_usual(bucket, *usual, keeps)
            return
        entries: list[EngineTensor] = []
        items: list[Item] = []
        unused: list[int] = []
        is_on_device = self.device.is_on_device
        later: list[tuple[int, torch.Tensor]] = []
        near: list[torch.Tensor] = []  # the engine takes what is on a GPU as it is
        is_direct = self._frontend.is_direct()
        for index in bucket.indices:
            own = grad = None if blank or index in lent else parameters[index].grad
            if grad is None:
                unused.append(index)
                grad = torch.zeros_like(parameters[index], requires_grad=False)
            version = grad._version
            is_near = is_plain and grad.is_cpu and not is_on_device(grad)
            code = AVERAGED.get(grad.dtype) if is_near else None
            if code is not None and self._blocks is not None:
                code += self._coding(index)
            if code is not None and not grad.is_sparse and is_plain_block(grad):
                address = grad.data_ptr()
                result = self._spare.take(index, grad) if keeps else grad
                entries.append((code, grad.shape, address, result.data_ptr()))
                items.append((index, own, version, result, None))
                continue
            if is_plain and self._is_simple(grad) and is_on_device(grad):
                if is_direct:
                    near.append(grad)
                else:
                    later.append((len(entries), grad))
                    entries.append((AVERAGED[grad.dtype], grad.shape, _LATER, _LATER))
                items.append((index, own, version, grad, None))
                continue
            try:
                encoded, views = self._pack(index, grad, keeps)
            except InvalidArgumentError as error:
                if problems is None:
                    raise
                problems.append(error)
                encoded, views = self._pack(index, _zeros_for(parameters[index]), keeps)
            if encoded.payload.codec:
                views = coded(views, [encoded.payload.codec])
            for view, tensor in zip(views, encoded.received, strict=True):
                if view[2] == _LATER:
                    later.append((len(entries), tensor))
                entries.append(view)
            items.append((index, own, version, grad, encoded))
        if self.check is not None and is_plain and not (blank or later or near):
            self.check(entries, bucket.indices)
        if is_plain:
            self._launch(bucket, entries, items, later, near)
        else:
            self._launch_encoded(bucket, entries, items, later)
        bucket.items, bucket.unused = items, unused

    def _is_simple(self, grad: torch.Tensor) -> bool:
        """Return whether ``grad`` can be copied to be sent, without a look at its memory."""
        is_strided = type(grad) is torch.Tensor and grad.layout is torch.strided
        return is_strided and grad.dtype in AVERAGED and self._blocks is None

    def _how(self, world: WorldLike) -> tuple[int, float, float, int, bool]:
        """Return the arguments by which the engine combines gradients among ``world``'s ranks."""
        spec = self._spec
        _, counting = transaction().counting(world)
        if counting == world.size or spec.op != Average:
            return int(spec.op), spec.prescale, spec.postscale, 0, False
        return int(Sum), spec.prescale, spec.postscale / counting, 0, False

    def _coding(self, index: int) -> int:
        """Return the number added to the dtype of a gradient that the engine is to encode."""
        known = self._codings.get(index)
        if known is None:
            assert self._blocks is not None
            name, parameter = self._parameters.names[index], self._parameters.tensors[index]
            known = with_codec(self._blocks.codec_of(name, parameter.dim()))
            self._codings[index] = known
            if known:
                tell_where_useless(self._verbs.world())
        return known

    def _pack(
        self, index: int, grad: torch.Tensor, keeps: bool
    ) -> tuple[EncodedGradient, list[EngineTensor]]:
        """Return what is sent of a gradient that is compressed or not dense, and its views.

        There are no views of what is gathered. Tensors on a GPU are looked at when they have been
        copied. ``keeps``: the gradient itself is not overwritten.
        """
        if grad.is_sparse and self._spec.sparse_as_dense:
            grad = grad.to_dense()
        plain, key = grad.detach(), self._parameters.names[index]
        views: list[EngineTensor] = []
        owners: list[torch.Tensor] = []
        try:
            if plain.is_sparse:
                self._frontend.view(plain)  # which says that it cannot be sent
            compressor = self._compressor
            encoded = _encoded(compressor, key, plain, grad)
            if encoded.payload.verb == "allgather":
                return encoded, views
            for small in encoded.payload.tensors:
                tensor = grad if small is plain else small
                code_of(tensor, AVERAGED)
                if keeps and compressor.keeps_state and tensor is not grad:
                    tensor = tensor.clone()
                if self.device.is_on_device(tensor) and not self._frontend.is_direct():
                    views.append((code_of(tensor), tensor.shape, _LATER, _LATER))
                else:
                    if keeps and tensor is grad:
                        tensor = grad.detach().clone()
                    code, shape, address, tensor = self._frontend.view(tensor)
                    views.append((code, shape, address, address))
                owners.append(tensor)
        except InvalidArgumentError as error:
            raise FrontEndArgumentError(f"gradient of '{key}': {error}") from None
        encoded.received = owners
        return encoded, views

    def _submit_sparse(self, bucket: Bucket, blank: bool) -> None:
        (index,) = bucket.indices
        parameter = self._parameters.tensors[index]
        own = None if blank or index in self._parameters.lent else parameter.grad
        grad = sparse.without_entries(parameter, bucket.sparse_dim) if own is None else own
        version = 0 if own is None else own._version
        key = self._parameters.names[index]
        encoded = _encoded(sparse.SparseCompressor(bucket.sparse_dim), key, grad, grad)
        items: list[Item] = [(index, own, version, grad, encoded)]
        self._gather(bucket, items, bucket.name)
        bucket.items, bucket.unused = items, [index] if own is None else []

    def _launch_encoded(
        self,
        bucket: Bucket,
        entries: list[EngineTensor],
        items: list[Item],
        later: list[tuple[int, torch.Tensor]],
    ) -> None:
        """Send what is reduced in one operation, and what is gathered in another."""
        reduced: list[Item] = []
        gathered: list[Item] = []
        for item in items:
            is_gathered = (
                isinstance(item[4], EncodedGradient) and item[4].payload.verb == "allgather"
            )
            (gathered if is_gathered else reduced).append(item)
        if reduced:
            self._launch(bucket, entries, reduced, later)
        if gathered:
            self._gather(bucket, gathered, f"{bucket.name}.gathered" if reduced else bucket.name)

    def _launch_usual(
        self, bucket: Bucket, entries: list[EngineTensor], items: list[Item], keeps: bool
    ) -> None:
        """Send gradients as they are. Results take their places, or for ``keeps`` spare ones."""
        for place, (index, own, version, grad, _) in enumerate(items if keeps else ()):
            result = self._spare.take(index, grad)
            entries[place] = (*entries[place][:3], result.data_ptr())
            items[place] = (index, own, version, result, None)
        if self.check is not None:
            self.check(entries, bucket.indices)
        self._launch(bucket, entries, items, [])
        bucket.items, bucket.unused = items, []

    def _launch(
        self,
        bucket: Bucket,
        entries: list[EngineTensor],
        items: list[Item],
        later: list[tuple[int, torch.Tensor]],
        near: Sequence[torch.Tensor] = (),
    ) -> None:
        """Send ``entries``. ``later``: the places among them of what is on a GPU, and the tensors.

        ``near``: what is on a GPU, too, and is sent from there.
        """
        in_flight = InFlightBucket(bucket, items, [])
        world = self._verbs.world()
        engine = world.engine
        for tensors in by_kind(near, lambda tensor: tensor):
            flat = self.device.join(tensors)
            code, shape, address, _ = self._frontend.view(flat)
            entries.append((code, shape, address, address))
            in_flight.copied.append((flat, tensors))
        if later:
            events = self._stage(in_flight, entries, later)
            submit = partial(self._submit_staged, engine, bucket, entries, self._how(world))
            queued = Queued(events, submit, engine, in_flight)
            stager.put(queued)
            self._in_flight.add(staged(queued, in_flight))
        else:
            try:
                number = engine.submit(_ALLREDUCE, bucket.name, entries, *self._how(world))
            except _native.EngineError as error:
                raise from_engine(error) from None
            self._in_flight.add(submitted(engine, number, in_flight))
        bucket.is_sent = True

    def _submit_staged(
        self,
        engine: _native.Engine,
        bucket: Bucket,
        entries: Sequence[EngineTensor],
        how: tuple[int, float, float, int, bool],
    ) -> int:
        """Submit a bucket, in the thread that sends what has come from a GPU."""
        if self.checks(bucket):
            assert self.check is not None
            self.check(entries, bucket.indices, is_late=True)
        return engine.submit(_ALLREDUCE, bucket.name, entries, *how)

    def _gather(self, bucket: Bucket, items: list[Item], name: str) -> None:
        """Gather the tensors of all encoded gradients in one operation."""
        sent = [item[4] for item in items if isinstance(item[4], EncodedGradient)]

        def take(results: list[torch.Tensor]) -> None:
            rest = iter(results)
            for encoded in sent:
                encoded.received = [next(rest) for _ in encoded.payload.tensors]

        tensors = [tensor for encoded in sent for tensor in encoded.payload.tensors]
        handle = self._verbs.grouped_allgather_async(tensors, name)
        self._in_flight.add(handled(handle, take, InFlightBucket(bucket, items, [])))
        bucket.is_sent = True

    def _stage(
        self,
        in_flight: InFlightBucket,
        entries: list[EngineTensor],
        later: list[tuple[int, torch.Tensor]],
    ) -> list[Event]:
        """Enqueue the copies of gradients to pinned memory, beside what backward goes on with."""
        events = []
        streams = in_flight.bucket.streams
        for placed in by_kind(later, lambda each: each[1]):
            tensors = [tensor for _, tensor in placed]
            count = sum(tensor.numel() for tensor in tensors)
            host = self.device.pinned(count, tensors[0].dtype)
            with self.device.beside(tensors[0], {self.device.stream_of(tensors[0]), *streams}):
                self.device.pack(tensors, host)
                events.append(self.device.mark(tensors[0], sleeps=True))
            address = host.data_ptr()
            for place, tensor in placed:
                entries[place] = (*entries[place][:2], address, address)
                address += tensor.numel() * host.element_size()
            in_flight.copied.append((host, tensors))
        streams.clear()
        return events


def _encoded(
    compressor: Compressor, key: str, grad: torch.Tensor, source: torch.Tensor
) -> EncodedGradient:
    with torch.no_grad():
        return EncodedGradient(compressor, key, payload_of(compressor, key, grad, source))


def _zeros_for(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros to send, for ranks that wait, instead of a gradient that cannot be sent."""
    dtype = parameter.dtype if parameter.dtype in AVERAGED else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype)
