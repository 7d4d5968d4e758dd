"""A rank's side of the conversation at the rendezvous server (server.py).

A rank that has joined stays connected until all have formed the world: so the rendezvous server
notices at once when one ends, and says so to the others.
"""

from __future__ import annotations

import contextlib
import math
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

from kolovod.errors import (
    AuthenticationError,
    BootstrapError,
    KolovodError,
    RankLostError,
)
from kolovod.net import messages
from kolovod.net.addresses import LOOPBACK, connect_any, split_addresses
from kolovod.net.channel import Channel
from kolovod.net.lost_hosts import notice_lost_host
from kolovod.net.sockets import poll_until
from kolovod.rendezvous import versions
from kolovod.rendezvous.protocol import Formation, Member, parse_answer, raise_told, spans
from kolovod.rendezvous.server import GONE_GRACE_S, LABEL

__all__ = ["Joined", "join"]

_ANSWER_GRACE_S = 5.0  # the rendezvous server's own deadline comes first: it knows who is missing
_SEND_TIMEOUT_S = 5.0
_REACH_S = 3.0
WORD_S = GONE_GRACE_S + 1.5
"""For the rendezvous server to say why somebody cannot be reached."""


class Joined:
    """A rank that has met the others, and is forming a world with them.

    A context manager: leaving it with an error lets all the others hear that.
    """

    def __init__(self, channel: Channel, formation: Formation) -> None:
        """Takes the channel over."""
        self.formation = formation
        self._channel = channel
        self._has_heard = (
            False  # an error of the rendezvous server, which the others have heard, too
        )
        self.is_open = True

    def fileno(self) -> int:
        """Return the connection's descriptor: it is readable when ``check`` may have to raise."""
        return self._channel.fileno()

    def check(self, wait_s: float = 0.0) -> None:
        """Raise what the rendezvous server says within ``wait_s``, if it says something.

        A rendezvous server that is gone says nothing: it may be in a process that needed it no
        longer.
        """
        self._hear(time.monotonic() + wait_s)

    def formed(self, deadline: float) -> None:
        """Say that this rank has formed the world, and wait until all have.

        Raises what keeps them from it: RankLostError, StartTimeoutError, BootstrapError.
        """
        self._say({"formed": self.formation.epoch})
        if self.is_open and not self._hear(deadline + _ANSWER_GRACE_S) and self.is_open:
            raise BootstrapError(
                "the rendezvous server has not said in time whether the world has formed"
            )

    def _hear(self, deadline: float) -> bool:
        """Return whether the server has said, by the deadline, that all have formed the world."""
        if not self.is_open:
            return False
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        if not poll_until(poll, deadline):
            return False
        try:
            message = self._channel.receive(time.monotonic() + _SEND_TIMEOUT_S)
        except (EOFError, OSError):
            self.close()
            return False
        try:
            raise_told(message)
        except KolovodError:
            self._has_heard = True
            raise
        messages.whole(message, "formed", self.formation.epoch, self.formation.epoch)
        return True

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send(message, time.monotonic() + _SEND_TIMEOUT_S)
        except OSError:
            # It may have said why before it went away.
            self._hear(time.monotonic())
            self.close()

    def close(self) -> None:
        """Leave the rendezvous server. Idempotent."""
        self.is_open = False
        self._channel.close()

    def __enter__(self) -> Joined:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self.is_open and not self._has_heard:
            text = (
                str(error)
                if isinstance(error, KolovodError)
                else f"{type(error).__name__}: {error}"
            )
            lost = error.rank if isinstance(error, RankLostError) else None
            with contextlib.suppress(KolovodError):
                self._say({"error": text, "rank": lost})
        self.close()


def join(
    address: str,
    secret: str,
    members: Sequence[int],
    member: Member,
    timeout_s: float,
    config: Mapping[str, int] | None = None,
    notes: Mapping[str, str] | None = None,
    scope: int = 0,
) -> Joined:
    """Wait at the server at ``address`` ("host:port", or several) until all ``members`` joined.

    ``config``: this rank's engine configuration, which holds for all if it is the first member.
    ``notes``: what it tells the others in that case, a few short texts. ``scope``: the epoch
    in whose world ranks have these numbers; 0: they are launcher ranks. Then the server is there
    already, and its host counts as lost when it says nothing for some seconds.

    Raises RankLostError if one of them has ended, StartTimeoutError naming the missing ones,
    InvalidArgumentError if they ask for different worlds, AuthenticationError, BootstrapError.
    """
    split_addresses(address, "KOLOVOD_STORE")
    deadline = time.monotonic() + timeout_s + _ANSWER_GRACE_S
    request = {
        **versions.own(),
        "members": spans(members),
        "member": astuple(member),
        "config": dict(config or {}) if member.rank == members[0] else {},
        "notes": dict(notes or {}) if member.rank == members[0] else {},
        "timeout_s": timeout_s,
        "scope": scope,
    }
    try:
        channel = connect_any(
            address,
            secret,
            LABEL,
            deadline,
            encrypted=member.encrypts,
            reach_s=_REACH_S if scope else math.inf,
        )
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(channel.close)
            if scope:
                notice_lost_host(channel.fileno())
            channel.send(request, deadline)
            formation = parse_answer(lambda: channel.receive(deadline), members, config)
            cleanup.pop_all()
            return Joined(channel, formation)
    except AuthenticationError:
        raise
    except (EOFError, OSError) as error:
        elsewhere = (
            ""
            if address.startswith(LOOPBACK)
            else " If other hosts cannot reach that host there, set KOLOVOD_STORE_HOST and "
            "KOLOVOD_STORE_PORT for the launcher to where they can"
        )
        raise BootstrapError(
            f"rank {member.rank} cannot reach the job's rendezvous server at {address} ({error}): "
            f"has the launcher ended, or rank 0's process, if that holds it?{elsewhere}"
        ) from error
