"""Which gradients travel together, and when backward has finished them.

Buckets keep the cost of small tensors down: a hook only counts, and 500 tensors of 4 KiB are two
requests. They follow from the order in which the first backward has made gradients on the first
rank, and from their sizes, so they are the same on every rank, in whatever order gradients appear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from kolovod import _native
from kolovod.core.collectives import Collectives
from kolovod.core.numpy_frontend import NumpyFrontend
from kolovod.core.process_sets import ProcessSet
from kolovod.errors import InvalidArgumentError
from kolovod.gradients.agreement import SAME_MODEL, agree_on_optimizer
from kolovod.torch import sparse
from kolovod.torch.autograd import TorchCollectives
from kolovod.torch.buckets import Bucket, Way, cut
from kolovod.torch.countdown import Countdown
from kolovod.torch.sender import Sender


class _Removable(Protocol):
    def remove(self) -> None: ...


class TooManyPassesError(InvalidArgumentError, AssertionError):
    """A backward pass more than ``backward_passes_per_step``; Horovod's is an AssertionError."""


class Arrangement(Sender):
    """The half of GradientReducer that has the parameters, their hooks and the buckets."""

    def __init__(
        self,
        named: Iterable[tuple[str | None, torch.Tensor]],
        way: Way,
        passes: int,
        verbs: TorchCollectives,
        groups: Mapping[int, int],
        process_set: ProcessSet | None = None,
    ) -> None:
        """``passes``: backward passes that are summed locally before a gradient is sent.

        ``groups``: the number of a parameter's group, by its ``id``; groups travel whole.
        ``process_set``: those that ``verbs`` work among; other ranks' gradients stay as they are.
        """
        super().__init__(way, verbs)
        self._countdown = Countdown(passes)
        self._groups = groups
        self._hooks: dict[int, _Removable] = {}  # by parameter
        self._frozen: list[tuple[str | None, torch.Tensor]] = []
        self._buckets: list[Bucket] = []
        self._engine: _native.Engine | None = None  # of the world whose ranks have agreed
        self._number = 0  # of this optimizer in that world
        self._agreed = 0  # so many parameters
        self._first: dict[int, None] = {}  # those that backward has finished so far, in that order
        self._process_set = process_set
        is_member = process_set is None or process_set.included()
        self.active = is_member and verbs.world().size > 1
        self.add(named)

    def add(self, named: Iterable[tuple[str | None, torch.Tensor]]) -> None:
        """Take more parameters; those that want no gradient are left alone until they do.

        Name None: not known, which is an error as soon as the parameter wants a gradient.
        """
        self._frozen += named
        self._thaw()

    def _thaw(self) -> list[InvalidArgumentError]:
        """Take the parameters that want a gradient by now. Returns what is wrong with some."""
        if not self._frozen:
            return []
        named = self._frozen
        self._frozen = [pair for pair in named if pair[0] is None or not pair[1].requires_grad]
        wanted = [(name, p) for name, p in named if name is not None and p.requires_grad]
        first = len(self._names)
        self._names += [name for name, _ in wanted]
        self._parameters += [parameter for _, parameter in wanted]
        self._countdown.add(len(wanted))
        for indices in cut(range(first, len(self._names)), self._parameters, self._groups):
            bucket = Bucket(indices)
            self._buckets.append(bucket)
            for index in indices if self.active else ():
                self._hook(index, bucket)
        return [
            InvalidArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} wants a gradient now, but "
                "named_parameters did not name it: pass the frozen parameters' names too"
            )
            for _, parameter in self._frozen
            if parameter.requires_grad
        ]

    def _hook(self, index: int, bucket: Bucket) -> None:
        before = self._hooks.get(index)
        if before is not None:
            before.remove()
        register = self._parameters[index].register_post_accumulate_grad_hook
        make = self._make_first_hook if self._engine is None else self._make_hook
        self._hooks[index] = register(make(index, bucket))  # type: ignore[no-untyped-call]

    def _make_first_hook(self, index: int, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        """Until ranks have agreed upon buckets: what they will follow from is noted as well."""
        hook, left, first = self._make_hook(index, bucket), self._countdown.left, self._first

        def noting(parameter: torch.Tensor) -> None:
            hook(parameter)
            if left[index] == 0:
                first[index] = None

        return noting

    def _make_hook(self, index: int, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        """[1], with everything at hand as a local: this runs once per gradient."""
        left = self._countdown.left
        complete = self._complete
        is_on_device, stream_of = self._device.is_on_device, self._device.stream_of
        streams = bucket.streams

        def hook(parameter: torch.Tensor) -> None:
            remaining = left[index] = left[index] - 1
            if remaining > 0:
                return
            if remaining < 0:
                self._one_more(index, bucket)
                return
            if is_on_device(parameter):  # backward uses the streams that forward has used
                streams.add(stream_of(parameter))
            bucket.missing -= 1
            if bucket.missing == 0:
                complete(bucket)

        return hook

    def _complete(self, bucket: Bucket) -> None:
        """Backward has finished a bucket: send it, if all ranks have agreed upon it."""
        is_known = self.verbs.world().engine is self._engine
        if is_known and bucket.agreed:
            self._submit(bucket)
            return
        if not is_known:
            self._discard()
        for index in bucket.indices:
            grad = self._parameters[index].grad
            if grad is not None:
                bucket.items.append((index, grad, grad._version, grad, grad, None))

    def _one_more(self, index: int, bucket: Bucket) -> None:
        """One backward more than ``passes``: well if the earlier gradient was thrown away."""
        grad = self._parameters[index].grad
        if bucket.items:
            is_new = all(own is not grad for i, own, *_ in bucket.items if i == index)
        else:
            is_new = grad is None or grad._version == 0  # accumulating in place would count
        if not is_new:
            passes = self._countdown.passes
            raise TooManyPassesError(
                f"the gradient of '{self._names[index]}' was computed {passes + 1} times "
                f"since the last step(), but backward_passes_per_step is {passes}: call "
                f"step() after {passes}, or pass backward_passes_per_step={passes + 1}, or let all "
                "but the last run within optimizer.no_sync(); optimizer.zero_grad() throws a "
                "gradient away; for layers shared under torch.utils.checkpoint, use_reentrant=False"
            )

    def remove_hooks(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _meet(self) -> None:
        """Once per world: have all ranks the same parameters? They number the optimizer, too.

        Numbers keep the names of several optimizers apart, of dropped ones too.
        """
        engine = self.verbs.world().engine
        if engine is self._engine:
            return
        self._discard()
        self._number, dims = self._compared(range(len(self._names)), [], SAME_MODEL)
        self._engine = engine
        self._agreed = 0
        self._arrange()
        self._single_out(dims)
        self._accept(self._buckets)

    def _compared(
        self, indices: Iterable[int], further: list[tuple[str, Any]], advice: str
    ) -> tuple[int, list[int]]:
        """What ``agree_on_optimizer`` says of these parameters, behind ``further``."""
        mine = [*further, *self._details(indices)]
        dims, among = self._sparse_dims(), self._process_set
        return agree_on_optimizer(self.verbs.world, mine, advice, dims, among)

    def _arrange(self) -> None:
        """Cut the buckets in the order in which backward makes gradients on the first rank.

        In whatever order they were noted: a bucket leaves when the last of its gradients is there.
        """
        unused = (index for index in range(len(self._names)) if index not in self._first)
        order = np.array([*self._first, *unused], np.int64)
        Collectives(NumpyFrontend(), self.verbs.world).broadcast_(order, 0, "optimizer.order")
        items = {item[0]: item for bucket in self._buckets for item in bucket.items}
        streams = {stream for bucket in self._buckets for stream in bucket.streams}
        self._buckets.clear()
        for indices in cut(order.tolist(), self._parameters, self._groups):
            bucket = Bucket(indices)
            bucket.items = [items[index] for index in indices if index in items]
            bucket.missing = sum(self._countdown.numbers[index] > 0 for index in indices)
            bucket.streams |= streams
            self._buckets.append(bucket)
            for index in indices:
                if index in self._hooks:  # they were not removed
                    self._hook(index, bucket)

    def _sparse_dims(self) -> list[int]:
        """What this rank knows; what ranks of an earlier world have agreed upon stays sparse."""
        dims = [sparse.sparse_dim_of(p.grad, self._way) for p in self._parameters]
        for bucket in self._buckets:
            if bucket.sparse_dim:
                dims[bucket.indices[0]] = bucket.sparse_dim
        return dims

    def _single_out(self, sparse_dims: list[int]) -> None:
        """What is sparse on some rank travels alone, and as sparse, on all."""
        left = self._countdown.numbers
        for bucket in list(self._buckets):
            for index in [index for index in bucket.indices if sparse_dims[index]]:
                alone = bucket
                if len(bucket.indices) > 1:
                    alone = Bucket([index])
                    alone.items = [item for item in bucket.items if item[0] == index]
                    bucket.indices.remove(index)
                    bucket.items = [item for item in bucket.items if item[0] != index]
                    self._buckets.append(alone)
                    self._hook(index, alone)
                alone.sparse_dim = sparse_dims[index]
                for changed in (bucket, alone):
                    changed.missing = sum(left[i] > 0 for i in changed.indices)

    def _details(self, indices: Iterable[int]) -> list[tuple[str, Any]]:
        return [(self._names[index], tuple(self._parameters[index].shape)) for index in indices]

    def _accept(self, buckets: list[Bucket]) -> None:
        for bucket in buckets:
            bucket.agreed = True
            bucket.name = f"gradients.{self._number}.{self._names[bucket.indices[0]]}"
            self._agreed += len(bucket.indices)
