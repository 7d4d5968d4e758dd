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
from typing import Any

from kolovod import _native
from kolovod.core.buffers import Buffers, Prepared, held
from kolovod.core.frontend import Frontend
from kolovod.core.handles import Handle
from kolovod.core.submission import (
    EngineTensor,
    Group,
    Request,
    Submitter,
    WorldLike,
    position_of,
    rank_number,
)
from kolovod.core.verbs import RECV, SEND
from kolovod.errors import InvalidArgumentError

_ANY = -1
_MAX_TAG = (1 << 63) - 1


class Transfers:
    """The verbs between two ranks, on the tensors of one framework."""

    def __init__(self, frontend: Frontend[Any], world: Callable[[], WorldLike]) -> None:
        """``world`` is asked on every call."""
        self._frontend = frontend
        self._holder = frontend.holder
        submitter = Submitter(world)
        self._own = Buffers(frontend, submitter.membership).own
        self._membership, self._run, self._start = (
            submitter.membership,
            submitter.run,
            submitter.start,
        )

    def send(self, tensor: Any, dst: int, tag: int = 0, process_set: Group | None = None) -> None:
        """Send ``tensor``, of any shape and dtype that the engine knows, to rank ``dst``.

        ``dst`` is a rank of the world, also with a ``process_set`` (whose messages are apart from
        all others'); ``tag`` an int from 0 on. Returns when ``tensor`` may be written again.
        """
        self._not_to_itself("send to", "dst", dst, process_set)
        request, entry, buffers = self._sending(tensor, dst, tag, process_set)
        self._run(request, [entry], buffers, None, request.splits)

    def isend(
        self, tensor: Any, dst: int, tag: int = 0, process_set: Group | None = None
    ) -> Handle[None]:
        """``send`` that returns at once; leave ``tensor`` alone until ``wait`` returned."""
        request, entry, buffers = self._sending(tensor, dst, tag, process_set)
        if self._holder is not None and buffers[1] is tensor:
            buffers = (buffers, self._holder.hold(tensor))
        return self._start(request, [entry], buffers, None, None, request.splits)

    def recv(
        self, tensor: Any, src: int | None = None, tag: int = 0, process_set: Group | None = None
    ) -> int:
        """Receive into ``tensor`` a message of rank ``src``, or of any rank (None).

        Returns the rank that sent it, a rank of the world.
        """
        if src is not None:
            self._not_to_itself("recv from", "src", src, process_set)
        request, entry, owner = self._receiving(tensor, src, tag, process_set)
        finish = self._finish(tensor, owner, process_set)
        source: int = self._run(request, [entry], (tensor, owner), finish, request.splits)
        return source

    def irecv(
        self, tensor: Any, src: int | None = None, tag: int = 0, process_set: Group | None = None
    ) -> Handle[int]:
        """``recv`` that returns at once; ``wait`` of the handle returns who sent the message."""
        request, entry, owner = self._receiving(tensor, src, tag, process_set)
        finish = self._finish(tensor, owner, process_set)
        prepared = Prepared([entry], (tensor, owner), None, finish, [tensor])
        entries, buffers, _, at_end, _ = held(prepared, request, self._holder)
        return self._start(request, entries, buffers, None, at_end, request.splits)

    def _sending(
        self, tensor: Any, dst: int, tag: int, process_set: Group | None
    ) -> tuple[Request, EngineTensor, tuple[Any, Any]]:
        dtype, shape, address, owner = self._frontend.host_view(tensor)
        root = position_of(rank_number("dst", dst), process_set)
        if root < 0:
            raise InvalidArgumentError(f"dst is {dst}: give the number of a rank")
        request = Request(SEND, None, process_set, root=root, splits=[_tag(tag)])
        return request, (dtype, shape, address, address), (tensor, owner)

    def _receiving(
        self, tensor: Any, src: int | None, tag: int, process_set: Group | None
    ) -> tuple[Request, EngineTensor, Any]:
        entry, owner = self._own(tensor, self._frontend.host_view)
        root = _ANY if src is None else position_of(rank_number("src", src), process_set)
        if root < 0 and src is not None:
            raise InvalidArgumentError(f"src is {src}: give the number of a rank, or None for any")
        request = Request(RECV, None, process_set, root=root, splits=[_tag(tag)])
        return request, entry, owner

    def _finish(
        self, tensor: Any, owner: Any, process_set: Group | None
    ) -> Callable[[_native.Engine, int], int]:
        copy_back = None if owner is tensor else self._frontend.copy_back

        def finish(engine: _native.Engine, number: int) -> int:
            if copy_back is not None:
                copy_back(owner, tensor)
            source = engine.rows(number, 0)[0]
            return source if process_set is None else process_set.ranks[source]

        return finish

    def _not_to_itself(self, what: str, label: str, peer: int, process_set: Group | None) -> None:
        place = self._membership(process_set)
        if position_of(rank_number(label, peer), process_set) == place.rank:
            raise InvalidArgumentError(
                f"{what} rank {peer}, which is this one, would wait for itself: use isend and irecv"
            )


def _tag(value: Any) -> int:
    try:
        tag = index(value)
    except TypeError:
        raise InvalidArgumentError(f"tag is {value!r}: give an int from 0 on") from None
    if not 0 <= tag <= _MAX_TAG:
        raise InvalidArgumentError(f"tag is {tag}: give an int from 0 to 2**63 - 1")
    return tag
