"""Messages from one rank of a group to another: the engine's send and recv, as c10d wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kolovod import _native
from kolovod.c10d import staging
from kolovod.c10d.base import Base, Tensors, in_place, on_stream
from kolovod.c10d.flat import Flat
from kolovod.c10d.work import Work
from kolovod.core.submission import Request
from kolovod.core.verbs import RECV, SEND, Verb
from kolovod.errors import GroupArgumentError

__all__ = ["Received", "Sending"]

_ANY = -1


class Message(Work):
    """A send."""

    _is_message = True


class Received(Message):
    """A receive: it also says whose message it was."""

    _source: list[int]

    def source_rank(self) -> int:
        """The rank in the group that sent it; waits for that."""
        self.wait()
        return self._source[0]

    _source_rank = source_rank


class Sending(Base):
    """send and recv. Both return at once: c10d's blocking ones wait for the work.

    Unlike collectives they never wait for operations on the same memory when they are submitted,
    since two ranks would wait for each other in a circle; a collective that reads what a receive
    is to write waits for that.
    """

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        """Send the one tensor to rank ``dst`` of the group."""
        flat = Flat(_one("send", tensors), moves_only=True)
        work: Work = self._message(Message, SEND, flat, dst, tag, [], None)
        return work

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        """Receive into the one tensor what rank ``src`` of the group sends."""
        flat = Flat(_one("recv", tensors), moves_only=True, is_read=False)
        source: list[int] = []

        def finish(engine: _native.Engine, number: int) -> None:
            flat.copy_back()
            source.append(engine.rows(number, 0)[0])

        work: Received = self._message(Received, RECV, flat, src, tag, [flat.tensor], finish)
        work._source = source
        return work

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive into the one tensor what any rank of the group sends."""
        return self.recv(tensors, _ANY, tag)

    def _message(
        self,
        kind: type[Any],
        verb: Verb,
        flat: Flat,
        peer: int,
        tag: int,
        outputs: Sequence[torch.Tensor],
        finish: Any,
    ) -> Any:
        entries = [flat.entry(flat.address)]
        stream = staging.stream_of(outputs)
        finish = on_stream(stream, in_place(outputs, verb, finish))
        handle = self._submitter.start(Request(verb, root=peer), entries, flat, None, finish, [tag])
        work = kind(handle, list(outputs), self._timeout_s, self._watcher, self._order, stream)
        self._keep(work, [flat], outputs)
        return work


def _one(what: str, tensors: Tensors) -> torch.Tensor:
    if len(tensors) != 1:
        raise GroupArgumentError(f"{what}: {len(tensors)} tensors were given; give one")
    return tensors[0]
