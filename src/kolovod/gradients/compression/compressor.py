"""The shape of a compressor: an object with a state for each gradient, in any framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from kolovod.core.codecs import Codec
from kolovod.errors import FrontEndArgumentError

Verb = Literal["allreduce", "allgather"]


class Key(str):
    """The key of a gradient, where people know it by another name.

    Such names may count how many layers a process has made, so a key that all ranks share has none.
    """

    __slots__ = ("name",)

    name: str

    def __new__(cls, key: object, name: str) -> Key:
        """``name``: what it is called."""
        made = super().__new__(cls, key)
        made.name = name
        return made


class Payload(NamedTuple):
    """The tensors sent for one gradient, the verb that sends them, what ``decompress`` needs."""

    tensors: Sequence[Any]
    """Tensors of the gradient's framework; an allreduce may overwrite them with its results. For an
    allgather each has a first dimension, of rows."""
    verb: Verb = "allreduce"
    """The verb, the same on all ranks for one gradient, as are the tensors' number and dtypes.

    ``allreduce``: shapes are the same, too; tensors come back combined by the optimizer's op and
    factors. ``allgather``: all ranks' rows come back, in the order of ranks; how many a rank sends
    is up to it.
    """
    context: Any = None
    """An object for ``decompress``, as it is; it does not travel."""
    codec: Codec = Codec.none
    """The codec by which the engine encodes the tensors of an allreduce between hosts."""


class Compressor(ABC):
    """Says what is sent instead of a gradient. Give each optimizer an instance of its own.

    All ranks make it alike. ``key`` names a gradient: the same in every step and on every rank, and
    in the next run of the program; a state (what was left out so far, say) is kept by it. A
    gradient that this rank lacks counts as zeros, and is compressed as such. What was sent and then
    thrown away (``zero_grad`` before ``step``) is lost with what it took from the state.
    """

    keeps_state: ClassVar[bool] = True
    """Compressing changes something, so it must run in every step, not once in a traced one."""

    @abstractmethod
    def compress(self, key: str, tensor: Any) -> Payload:
        """Return what is to be sent for ``tensor``, a dense gradient of any shape and dtype.

        It belongs to the caller: it may be read, or returned as it is, but not changed.
        """

    @abstractmethod
    def decompress(self, key: str, payload: Payload, received: Sequence[Any]) -> Any:
        """The combined gradient, of the shape and dtype that ``compress`` was given.

        ``payload``: what ``compress`` returned. ``received``: what came back of its tensors; they
        are this method's. Of an allgather it makes the *sum* over the ranks, which the caller
        divides for an average.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state by key, for ``load_state_dict`` to go on from here; or {}."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. Raises InvalidArgumentError for that of another compressor."""
        if state:
            raise FrontEndArgumentError(
                f"{type(self).__name__} keeps no state, but is to go on from that of "
                f"{', '.join(sorted(state)[:5])}: give it the compressor that made it"
            )
