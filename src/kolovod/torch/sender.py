"""Buckets of gradients on their way: submitted, waited for, let go."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kolovod import _native
from kolovod.core.handles import keeper
from kolovod.errors import InvalidArgumentError, from_engine
from kolovod.gradients.compression import Compression
from kolovod.torch import sparse
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, Entry, Item, Way, zeros_for
from kolovod.torch.device import Event
from kolovod.torch.frontend import DTYPES, TorchFrontend, code_of
from kolovod.torch.stager import Queued, stager

_ALLREDUCE = _native.VERBS["allreduce"]
_ALLGATHER = _native.VERBS["allgather"]
_LATER = -1  # the address of a gradient on a GPU, until there is memory for its copy


class Sender:
    """The half of GradientReducer that talks to the engine. Numbers in brackets: see there."""

    def __init__(self, way: Way, verbs: TorchCollectives) -> None:
        assert isinstance(verbs.frontend, TorchFrontend)
        self.verbs = verbs
        self._frontend = verbs.frontend
        self._device = verbs.frontend.device
        self._way = way
        self._op = int(way.op)
        self._names: list[str] = []
        self._parameters: list[torch.Tensor] = []
        self._in_flight: list[Bucket] = []

    def _submit(
        self,
        bucket: Bucket,
        problems: list[InvalidArgumentError] | None = None,
        blank: bool = False,
    ) -> None:
        """[2] Send a bucket; a parameter without a gradient counts as zeros.

        ``problems`` gets the errors of gradients that cannot be sent, for which zeros go; without
        it they are raised. ``blank``: send zeros only, to others who wait, and touch no gradient.
        """
        is_plain = self._way.compression is Compression.none
        is_prepared = bucket.sparse_dim or self._way.sparse_as_dense or not is_plain
        if bucket.streams and (is_prepared or self._frontend.is_direct()):
            self._device.follow(bucket.streams)  # what is made of gradients comes after them
            bucket.streams.clear()
        if bucket.sparse_dim:
            self._submit_sparse(bucket, blank)
            return
        items: list[Item] = []
        unused: list[int] = []
        entries: list[Entry] = []
        is_on_device = self._device.is_on_device
        later: list[int] = []
        for index in bucket.indices:
            own = grad = None if blank else self._parameters[index].grad
            if grad is None:
                unused.append(index)
                grad = torch.zeros_like(self._parameters[index], requires_grad=False)
            version = grad._version
            is_near = is_plain and grad.is_cpu and not is_on_device(grad)
            code = DTYPES.get(grad.dtype) if is_near else None
            if code is not None and not grad.is_sparse and grad.is_contiguous():
                address = grad.data_ptr()
                entries.append((code, grad.shape, address, address))
                items.append((index, own, version, grad, grad, None))
                continue
            try:
                entry, dense, context = self._prepare(index, grad)
            except InvalidArgumentError as error:
                if problems is None:
                    raise
                problems.append(error)
                entry, dense, context = self._prepare(index, zeros_for(self._parameters[index]))
            if entry[2] == _LATER:
                later.append(len(entries))
            entries.append(entry)
            items.append((index, own, version, grad, dense, context))
        events = self._stage(bucket, entries, items, later) if later else ()
        self._send(bucket, _ALLREDUCE, entries, items, unused, events)

    def _stage(
        self, bucket: Bucket, entries: list[Entry], items: list[Item], later: list[int]
    ) -> list[Event]:
        """Enqueue the copies of gradients to pinned memory, beside what backward goes on with."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place in later:
            tensor = items[place][4]
            groups.setdefault((tensor.device, tensor.dtype), []).append(place)
        events = []
        for (_, dtype), places in groups.items():
            tensors = [items[place][4] for place in places]
            host = self._device.pinned(sum(tensor.numel() for tensor in tensors), dtype)
            streams = {self._device.stream_of(tensors[0]), *bucket.streams}
            with self._device.beside(tensors[0], streams):
                self._device.pack(tensors, host)
                events.append(self._device.mark(tensors[0], sleeps=True))
            address = host.data_ptr()
            for place, tensor in zip(places, tensors, strict=True):
                entries[place] = (*entries[place][:2], address, address)
                address += tensor.numel() * host.element_size()
            bucket.staged.append((host, tensors))
        bucket.streams.clear()
        return events

    def _submit_sparse(self, bucket: Bucket, blank: bool) -> None:
        (index,) = bucket.indices
        own = None if blank else self._parameters[index].grad
        sent = sparse.parts(own, self._parameters[index], bucket.sparse_dim, self._way)
        entries, owners = zip(*(sparse.entry(p, self._frontend) for p in sent), strict=True)
        version = 0 if own is None else own._version
        codes = [code for code, *_ in entries]
        item: Item = (index, own, version, own, (*sent, *owners), codes)
        self._send(bucket, _ALLGATHER, list(entries), [item], [index] if own is None else [])

    def _send(
        self,
        bucket: Bucket,
        verb: int,
        entries: list[Entry],
        items: list[Item],
        unused: list[int],
        events: Sequence[Event] = (),
    ) -> None:
        """``events``: of the copies to memory that the engine can reach, or none."""
        engine, way = self.verbs.world().engine, self._way
        scales = (way.prescale, way.postscale)
        number = 0
        if events:
            submit = partial(engine.submit, verb, bucket.name, entries, self._op, *scales, 0, False)
            bucket.queued = Queued(events, submit, engine, (items, bucket.staged))
            stager.put(bucket.queued)
        else:
            try:
                number = engine.submit(verb, bucket.name, entries, self._op, *scales, 0, False)
            except _native.EngineError as error:
                raise from_engine(error) from None
        bucket.engine, bucket.number, bucket.items, bucket.unused = engine, number, items, unused
        self._in_flight.append(bucket)

    def _prepare(self, index: int, grad: torch.Tensor) -> tuple[Entry, torch.Tensor, Any]:
        """What the engine gets of a gradient that is compressed or not dense."""
        if grad.is_sparse and self._way.sparse_as_dense:
            grad = grad.to_dense()
        plain = grad.detach()
        small, context = self._way.compression.compress(plain)
        if small is plain:
            small = grad
        try:
            is_far = self._device.is_on_device(small) and not self._frontend.is_direct()
            if is_far and not small.is_sparse:
                return (code_of(small), small.shape, _LATER, _LATER), small, context
            code, shape, address, dense = self._frontend.view(small)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"gradient of '{self._names[index]}': {error}") from None
        return (code, shape, address, address), dense, context

    def _wait_for_all(self) -> list[Item]:
        """[4] Last submitted first: one wait drives the engine through all of them.

        Those of a GPU first submitted first, so that results go back while others are combined.
        """
        done: list[Item] = []
        failure: Exception | None = None
        while self._in_flight:
            at = 0 if self._in_flight[0].queued else -1
            bucket = self._in_flight[at]
            assert bucket.engine is not None
            try:
                number = bucket.queued.number() if bucket.queued else bucket.number
                bucket.engine.wait(number, -1.0)
                self._bring_back(bucket)
            except Exception as error:  # the engine's, or CUDA's
                failure = failure or error
            done += self._gathered(bucket) if bucket.sparse_dim and not failure else bucket.items
            self._in_flight.pop(at)
            self._let_go(bucket)
        if isinstance(failure, _native.EngineError):
            raise from_engine(failure)
        if failure is not None:
            raise failure
        return done

    def _bring_back(self, bucket: Bucket) -> None:
        """Enqueue, on the current stream, the copies of results to the GPU."""
        for host, tensors in bucket.staged:
            self._device.unpack(host, tensors)

    def _gathered(self, bucket: Bucket) -> list[Item]:
        """The item of a sparse bucket, with what the ranks' parts make together."""
        ((index, own, version, grad, sent, codes),) = bucket.items
        assert bucket.engine is not None
        assert isinstance(sent, tuple)
        shape, size = self._parameters[index].shape, self.verbs.world().size
        number, sent = bucket.number, sent[:2]
        total = sparse.joined(
            bucket.engine, number, sent, codes, shape, self._way, size, self._frontend
        )
        return [(index, own, version, grad, total, None)]

    def _discard(self) -> None:
        """Do not wait for what is on its way, in a world that is gone."""
        while self._in_flight:
            self._let_go(self._in_flight.pop())

    def _let_go(self, bucket: Bucket) -> None:
        """Its buffers stay alive until the engine is done with them."""
        assert bucket.engine is not None
        if bucket.queued is not None:
            bucket.queued.let_go()
        else:
            keeper.keep(bucket.engine, bucket.number, [item[4] for item in bucket.items])
        bucket.engine, bucket.number, bucket.items, bucket.unused = None, 0, [], []
        bucket.queued, bucket.staged = None, []

    def __del__(self) -> None:
        """Gradients on their way outlive this object."""
        for bucket in getattr(self, "_in_flight", ()):
            self._let_go(bucket)
