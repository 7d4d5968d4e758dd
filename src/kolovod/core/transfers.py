"""Messages from one rank to another: ``send``, ``recv`` and their asynchronous kinds.

A message is matched by its sender, its receiver and ``tag``; those that are alike in all three are
received in the order in which they were sent. No other rank takes part, and operations of all may
be pending meanwhile. Both ends give tensors of one dtype and number of elements.

What is little (4 KiB between ranks of one host, 64 KiB between hosts) goes at once: ``send``
returns although nobody receives it yet. Of more, ``send`` returns when it is received: the
receiver reads it from the sender's memory, or it is streamed. A rank that leaves with messages
still to be sent ends the world; what it has sent can still be received.

Errors, besides those of all verbs: MismatchError where the two ends do not fit, at the receiver
and, unless the message was little, at the sender.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import index
from typing import Any, TypeVar

from kolovod import _native
from kolovod.core.frontend import ON_DEVICE
from kolovod.core.handles import Handle
from kolovod.core.ops import Sum
from kolovod.core.submission import EngineTensor, Group, Submitter, position_of, rank_number
from kolovod.errors import InvalidArgumentError

T = TypeVar("T")

_SEND = _native.VERBS["send"]
_RECV = _native.VERBS["recv"]
_ANY = -1
_MAX_TAG = (1 << 63) - 1


class Transfers(Submitter[T]):
    """The verbs between two ranks, on the tensors of one framework."""

    def send(self, tensor: T, dst: int, tag: int = 0, process_set: Group | None = None) -> None:
        """Send ``tensor``, of any shape and dtype that the engine knows, to rank ``dst``.

        ``dst`` is a rank of the world, also with a ``process_set`` (whose messages are apart from
        all others'); ``tag`` an int from 0 on. Returns when ``tensor`` may be written again.
        """
        self._not_to_itself("send to", "dst", dst, process_set)
        entry, buffers, root, splits = self._sending(tensor, dst, tag, process_set)
        self._run(process_set, _SEND, None, [entry], Sum, 1.0, 1.0, root, buffers, None, splits)

    def isend(
        self, tensor: T, dst: int, tag: int = 0, process_set: Group | None = None
    ) -> Handle[None]:
        """``send`` that returns at once; leave ``tensor`` alone until ``wait`` returned."""
        entry, buffers, root, splits = self._sending(tensor, dst, tag, process_set)
        return self._start(
            process_set, _SEND, None, [entry], Sum, 1.0, 1.0, root, buffers, None, splits=splits
        )

    def recv(
        self, tensor: T, src: int | None = None, tag: int = 0, process_set: Group | None = None
    ) -> int:
        """Receive into ``tensor`` a message of rank ``src``, or of any rank (None).

        Returns the rank that sent it, a rank of the world.
        """
        if src is not None:
            self._not_to_itself("recv from", "src", src, process_set)
        entry, owner, root, splits = self._receiving(tensor, src, tag, process_set)
        finish = self._finish(tensor, owner, process_set)
        source: int = self._run(
            process_set, _RECV, None, [entry], Sum, 1.0, 1.0, root, (tensor, owner), finish, splits
        )
        return source

    def irecv(
        self, tensor: T, src: int | None = None, tag: int = 0, process_set: Group | None = None
    ) -> Handle[int]:
        """``recv`` that returns at once; ``wait`` of the handle returns who sent the message."""
        entry, owner, root, splits = self._receiving(tensor, src, tag, process_set)
        finish = self._finish(tensor, owner, process_set)
        return self._start(
            process_set,
            _RECV,
            None,
            [entry],
            Sum,
            1.0,
            1.0,
            root,
            (tensor, owner),
            None,
            finish,
            splits=splits,
        )

    def _sending(
        self, tensor: T, dst: int, tag: int, process_set: Group | None
    ) -> tuple[EngineTensor, object, int, list[int]]:
        dtype, shape, address, owner = self._view(tensor)
        _check_place(dtype)
        root = position_of(rank_number("dst", dst), process_set)
        if root < 0:
            raise InvalidArgumentError(f"dst is {dst}: give the number of a rank")
        return (dtype, shape, address, address), (tensor, owner), root, [_tag(tag)]

    def _receiving(
        self, tensor: T, src: int | None, tag: int, process_set: Group | None
    ) -> tuple[EngineTensor, T, int, list[int]]:
        entry, owner = self._own(tensor)
        _check_place(entry[0])
        root = _ANY if src is None else position_of(rank_number("src", src), process_set)
        if root < 0 and src is not None:
            raise InvalidArgumentError(f"src is {src}: give the number of a rank, or None for any")
        return entry, owner, root, [_tag(tag)]

    def _finish(
        self, tensor: T, owner: T, process_set: Group | None
    ) -> Callable[[_native.Engine, int], int]:
        copy_back = None if owner is tensor else self.frontend.copy_back

        def finish(engine: _native.Engine, number: int) -> int:
            if copy_back is not None:
                copy_back(owner, tensor)
            source = engine.rows(number, 0)[0]
            return source if process_set is None else process_set.ranks[source]

        return finish

    def _not_to_itself(self, what: str, label: str, peer: int, process_set: Group | None) -> None:
        place = self.membership(process_set)
        if position_of(rank_number(label, peer), process_set) == place.rank:
            raise InvalidArgumentError(
                f"{what} rank {peer}, which is this one, would wait for itself: use isend and irecv"
            )


def _check_place(dtype: int) -> None:
    if dtype >= ON_DEVICE:
        raise InvalidArgumentError(
            "messages between two ranks are of tensors in the host's memory: give tensor.cpu()"
        )


def _tag(value: Any) -> int:
    try:
        tag = index(value)
    except TypeError:
        raise InvalidArgumentError(f"tag is {value!r}: give an int from 0 on") from None
    if not 0 <= tag <= _MAX_TAG:
        raise InvalidArgumentError(f"tag is {tag}: give an int from 0 to 2**63 - 1")
    return tag
