"""Which gradients travel together, and what is known of them until they are back.

The plan follows from the order in which the first backward has made gradients on the first rank,
and from their sizes (``gradients/plan.py``), so it is the same on every rank, in whatever order
gradients appear. Until ranks have agreed, each parameter is a bucket of its own, whose completion
tells that order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from kolovod.errors import InvalidArgumentError
from kolovod.gradients import plan
from kolovod.gradients.compression import Compressor, Payload
from kolovod.torch.countdown import Countdown
from kolovod.torch.device import Cuda
from kolovod.torch.parameters import Parameters

_Each = TypeVar("_Each")

Item = tuple[int, "torch.Tensor | None", int, torch.Tensor, "Opened | None"]
"""One gradient of a bucket: the parameter's index; its ``grad`` and the version of that; what takes
the result (``grad`` itself, or zeros where there is none); and what has the result, or None
where the engine works on the gradient itself. A plain tuple: one is made per gradient and step."""


class Opened(Protocol):
    """An object that has the result of one gradient when its bucket is back."""

    def opened(self, scale_of_sum: float) -> torch.Tensor:
        """Return the combined gradient; ``scale_of_sum``: the factor for a sum of gathered ones."""
        ...


class EncodedGradient:
    """A payload that travels instead of a gradient that is compressed, or not one dense block."""

    __slots__ = ("compressor", "key", "payload", "received")

    def __init__(self, compressor: Compressor, key: str, payload: Payload) -> None:
        self.compressor, self.key, self.payload = compressor, key, payload
        self.received: Sequence[torch.Tensor] = ()
        """Tensors that the engine reduces in place, or has gathered."""

    def opened(self, scale_of_sum: float) -> torch.Tensor:
        """The combined gradient."""
        result: torch.Tensor = self.compressor.decompress(self.key, self.payload, self.received)
        is_sum = self.payload.verb == "allgather" and scale_of_sum != 1.0
        return result * scale_of_sum if is_sum else result


class InFlightBucket(NamedTuple):
    """The bucket, the gradients and the copies that one operation on its way works on."""

    bucket: Bucket
    items: list[Item]
    copied: list[tuple[torch.Tensor, list[torch.Tensor]]]
    """Memory, of the host or of the GPU, and the tensors on a GPU whose copies it holds, one after
    the other."""


class Bucket:
    """Parameters whose gradients are sent together; one only if its gradient is sparse."""

    __slots__ = (
        "agreed", "indices", "is_sent", "items", "missing", "name", "sparse_dim", "streams",
        "unused",
    )  # fmt: skip

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices
        self.missing = len(indices)  # gradients that backward has not finished yet
        self.agreed = False  # all ranks of this world have it, under this name
        self.name = ""
        self.is_sent = False
        self.streams: set[Any] = set()  # of GPUs, on which backward has made its gradients
        self.items: list[Item] = []  # as they were when they were sent
        self.unused: list[int] = []
        self.sparse_dim = 0  # how many dimensions the gradient has indices for; 0: it is dense

    def begun(self) -> bool:
        """Return whether backward has finished one of its gradients."""
        return self.missing < len(self.indices)


class Sends(ABC):
    """The base of what combines buckets: see ``Sender``, ``HookSender`` and ``ShardSender``."""

    device: Cuda
    keeps_buckets = False
    """It has a state by bucket, so that these stay as they are within a world."""

    def begin_world(self) -> None:  # noqa: B027 - what a sender keeps may be good in any world
        """Begin anew: ranks have agreed upon all buckets, in another world."""

    def details(self, indices: Iterable[int]) -> list[tuple[str, Any]]:
        """Return facts besides names and shapes that must be the same on all ranks."""
        return []

    @abstractmethod
    def submit(
        self,
        bucket: Bucket,
        problems: list[InvalidArgumentError] | None = None,
        blank: bool = False,
    ) -> None:
        """Send a bucket; a parameter without a gradient counts as zeros.

        ``problems`` gets the errors of gradients that cannot be sent, for which zeros go; without
        it they are raised. ``blank``: send zeros only, to others who wait, and touch no gradient.
        """

    def complete(self) -> list[Callable[[], None]]:
        """Run the operations that are left, when all buckets are back [4], on all ranks.

        Returns functions that are called before ``store``, once all ranks have come so far.
        """
        return []

    @abstractmethod
    def store(
        self, done: Sequence[Item], is_used: Callable[[int], bool], scale_of_sum: float
    ) -> None:
        """Put results where the optimizer looks for them [5].

        ``is_used(index)``: a parameter that no rank has used keeps no gradient, as with one
        process.
        """


def over(in_flight: InFlightBucket) -> None:
    """Note that the bucket of ``in_flight`` is not on its way any more."""
    bucket = in_flight.bucket
    bucket.is_sent, bucket.items, bucket.unused = False, [], []


def by_kind(
    each: Iterable[_Each], tensor_of: Callable[[_Each], torch.Tensor]
) -> Iterable[list[_Each]]:
    """Group items whose tensors have one dtype and are on one device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[_Each]] = {}
    for one in each:
        tensor = tensor_of(one)
        kinds.setdefault((tensor.device, tensor.dtype), []).append(one)
    return kinds.values()


class Buckets:
    """All buckets of an optimizer; each of its parameters is in one."""

    def __init__(
        self, parameters: Parameters, countdown: Countdown, groups: Mapping[int, int]
    ) -> None:
        """``groups``: the number of a parameter's group, by its ``id``; groups travel whole."""
        self.all: list[Bucket] = []
        self.of: list[Bucket] = []
        """Buckets by the parameter's index, always the same list, so that hooks can hold it."""
        self.order: dict[int, None] = {}
        """Indices of the gradients that the first backward has finished so far, in order."""
        self._parameters = parameters
        self._countdown = countdown
        self._groups = groups
        self.is_planned = False
        """Ranks have agreed upon an order of the gradients."""
        self.bucket_bytes = plan.BUCKET_BYTES
        """See ``plan.cut``; for what is cut from now on."""
        self.in_parts: set[int] = set()
        """Gradients that backward has computed several times in a pass: they wait for its end."""
        self.are_of_one_kind = False
        """No bucket has gradients of two dtypes or devices."""
        self.together: Callable[[Sequence[int], int], list[list[int]]] = lambda order, most: []
        """Returns what a sender wants to have in one bucket, of the gradients that backward makes
        in ``order``; ``most``: ``bucket_bytes``. The user's groups go before."""

    def extend(self, indices: Iterable[int]) -> None:
        """Put more parameters into buckets that ranks have not agreed upon yet."""
        fresh = list(indices)
        self._countdown.add(len(fresh))
        for part in self._cut(fresh) if self.is_planned else [[index] for index in fresh]:
            self._add(Bucket(part))

    def note(self, bucket: Bucket) -> None:
        """Note that backward has finished ``bucket``, which cannot be sent yet."""
        for index in bucket.indices:
            self.order.setdefault(index)

    def rearrange(self, order: Sequence[int]) -> None:
        """Cut all buckets anew, for gradients that backward makes in ``order``."""
        streams = {stream for bucket in self.all for stream in bucket.streams}
        self.all.clear()
        self.is_planned = True
        for indices in self._cut(order):
            bucket = Bucket(indices)
            bucket.streams |= streams
            self._add(bucket)
            self._count(bucket)

    def single_out(self, sparse_dims: Sequence[int]) -> None:
        """Let what is sparse on some rank travel alone, and as sparse, on all."""
        for bucket in list(self.all):
            for index in [index for index in bucket.indices if sparse_dims[index]]:
                alone = bucket
                if len(bucket.indices) > 1:
                    alone = Bucket([index])
                    bucket.indices.remove(index)
                    self._add(alone)
                alone.sparse_dim = sparse_dims[index]
                self._count(bucket)
                self._count(alone)

    def sparse_dims(self) -> dict[int, int]:
        """Return, by index, the number of sparse dimensions of gradients that travel as sparse."""
        return {bucket.indices[0]: bucket.sparse_dim for bucket in self.all if bucket.sparse_dim}

    def agreed(self) -> list[Bucket]:
        """Return the buckets that all ranks have."""
        return [bucket for bucket in self.all if bucket.agreed]

    def fresh(self) -> list[Bucket]:
        """Return the buckets that ranks have not agreed upon."""
        return [bucket for bucket in self.all if not bucket.agreed]

    def accept(self, buckets: Sequence[Bucket], number: int) -> None:
        """Note that all ranks have these, in the optimizer of that ``number``."""
        for bucket in buckets:
            bucket.agreed = True
            bucket.name = f"gradients.{number}.{self._parameters.names[bucket.indices[0]]}"

    def reset(self) -> None:
        """Wait for all gradients anew."""
        for bucket in self.all:
            bucket.missing = len(bucket.indices)

    def _cut(self, order: Sequence[int]) -> list[list[int]]:
        tensors = self._parameters.tensors
        sizes = {i: tensors[i].numel() * tensors[i].element_size() for i in order}
        numbers = ((i, self._groups.get(id(tensors[i]))) for i in order)
        grouped = {i: number for i, number in numbers if number is not None}
        for number, indices in enumerate(self.together(order, self.bucket_bytes), 1):
            for index in indices:
                grouped.setdefault(index, -number)
        parts = plan.cut(sizes, grouped, self.bucket_bytes)
        if not self.are_of_one_kind:
            return parts
        return [same for part in parts for same in by_kind(part, tensors.__getitem__)]

    def _add(self, bucket: Bucket) -> None:
        self.all.append(bucket)
        self.of.extend([bucket] * (len(self._parameters) - len(self.of)))
        for index in bucket.indices:
            self.of[index] = bucket

    def _count(self, bucket: Bucket) -> None:
        bucket.missing = sum(self._countdown.numbers[index] > 0 for index in bucket.indices)
