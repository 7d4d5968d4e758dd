"""Buckets of gradients on their way: submitted, waited for, let go."""

from __future__ import annotations

import torch

from kolovod import _native
from kolovod.errors import InvalidArgumentError, from_engine
from kolovod.handles import keeper
from kolovod.torch import sparse
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, Entry, Item, Way, zeros_for
from kolovod.torch.compression import Compression
from kolovod.torch.frontend import DTYPES

_ALLREDUCE = _native.VERBS["allreduce"]
_ALLGATHER = _native.VERBS["allgather"]


class Sender:
    """The half of GradientReducer that talks to the engine. Numbers in brackets: see there."""

    def __init__(self, way: Way, verbs: TorchCollectives) -> None:
        self.verbs = verbs
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
        if bucket.sparse_dim:
            self._submit_sparse(bucket, blank)
            return
        items: list[Item] = []
        unused: list[int] = []
        entries: list[Entry] = []
        is_plain = self._way.compression is Compression.none
        for index in bucket.indices:
            own = grad = None if blank else self._parameters[index].grad
            if grad is None:
                unused.append(index)
                grad = torch.zeros_like(self._parameters[index], requires_grad=False)
            version = grad._version
            code = DTYPES.get(grad.dtype) if is_plain and grad.is_cpu else None
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
            entries.append(entry)
            items.append((index, own, version, grad, dense, context))
        self._send(bucket, _ALLREDUCE, entries, items, unused)

    def _submit_sparse(self, bucket: Bucket, blank: bool) -> None:
        (index,) = bucket.indices
        own = None if blank else self._parameters[index].grad
        sent = sparse.parts(own, self._parameters[index], bucket.sparse_dim, self._way)
        entries = [sparse.entry(part, self.verbs.frontend) for part in sent]
        version = 0 if own is None else own._version
        item: Item = (index, own, version, own, sent, None)
        self._send(bucket, _ALLGATHER, entries, [item], [index] if own is None else [])

    def _send(
        self,
        bucket: Bucket,
        verb: int,
        entries: list[Entry],
        items: list[Item],
        unused: list[int],
    ) -> None:
        engine, way = self.verbs.world().engine, self._way
        try:
            number = engine.submit(
                verb, bucket.name, entries, self._op, way.prescale, way.postscale, 0, False
            )
        except _native.EngineError as error:
            raise from_engine(error) from None
        bucket.engine, bucket.number, bucket.items, bucket.unused = engine, number, items, unused
        self._in_flight.append(bucket)

    def _prepare(
        self, index: int, grad: torch.Tensor
    ) -> tuple[Entry, torch.Tensor, torch.dtype | None]:
        """What the engine gets of a gradient that is compressed or not dense."""
        if grad.is_sparse and self._way.sparse_as_dense:
            grad = grad.to_dense()
        small, context = self._way.compression.compress(grad.detach())
        try:
            code, shape, address, dense = self.verbs.frontend.view(small)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"gradient of '{self._names[index]}': {error}") from None
        return (code, shape, address, address), dense, context

    def _wait_for_all(self) -> list[Item]:
        """[4] Last submitted first: one wait drives the engine through all of them."""
        done: list[Item] = []
        failure: _native.EngineError | None = None
        while self._in_flight:
            bucket = self._in_flight[-1]
            assert bucket.engine is not None
            try:
                bucket.engine.wait(bucket.number, -1.0)
            except _native.EngineError as error:
                failure = failure or error
            done += self._gathered(bucket) if bucket.sparse_dim and not failure else bucket.items
            self._in_flight.pop()
            self._let_go(bucket)
        if failure is not None:
            raise from_engine(failure)
        return done

    def _gathered(self, bucket: Bucket) -> list[Item]:
        """The item of a sparse bucket, with what the ranks' parts make together."""
        ((index, own, version, grad, sent, context),) = bucket.items
        assert bucket.engine is not None
        assert isinstance(sent, tuple)
        shape, size = self._parameters[index].shape, self.verbs.world().size
        frontend = self.verbs.frontend
        total = sparse.joined(bucket.engine, bucket.number, sent, shape, self._way, size, frontend)
        return [(index, own, version, grad, total, context)]

    def _discard(self) -> None:
        """Do not wait for what is on its way, in a world that is gone."""
        while self._in_flight:
            self._let_go(self._in_flight.pop())

    def _let_go(self, bucket: Bucket) -> None:
        """Its buffers stay alive until the engine is done with them."""
        assert bucket.engine is not None
        keeper.keep(bucket.engine, bucket.number, [item[4] for item in bucket.items])
        bucket.engine, bucket.number, bucket.items, bucket.unused = None, 0, [], []

    def __del__(self) -> None:
        """Gradients on their way outlive this object."""
        for bucket in getattr(self, "_in_flight", ()):
            self._let_go(bucket)
