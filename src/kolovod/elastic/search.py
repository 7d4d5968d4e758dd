"""The search for a job's coordinator: those who listen are asked whether they are it, or who is."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kolovod.coordination.consensus import World
from kolovod.coordination.coordinator import LABEL
from kolovod.coordination.membership import Policy
from kolovod.coordination.protocol import policy_of, world_of
from kolovod.errors import AuthenticationError, BootstrapError
from kolovod.net import messages
from kolovod.net.addresses import connect_any
from kolovod.net.channel import Channel

__all__ = ["Answer", "ask", "ask_all"]

_CONNECT_S = 1.0
"""For a host to take the connection."""
_ANSWER_S = 5.0
"""For the process to answer."""
_AT_ONCE = 16
_MAX_NUMBER = 1 << 53
_MAX_ADDRESSES = 1 << 10


@dataclass(frozen=True)
class Answer:
    """The answer of a process that listens; see protocol.py."""

    coordinator: int | None
    """The coordinator's number that it is, or knows; None: it knows none."""
    channel: Channel | None
    """The connection to that coordinator, if it is here."""
    address: str
    """The coordinator's address if it is elsewhere; "": it is the launcher."""
    formed: World | None
    """The newest world that it knows."""
    rendezvous: str
    """The address at which worlds of that coordinator meet; "": where the job began."""
    policy: Policy | None

    def close(self) -> None:
        """Hang up."""
        if self.channel is not None:
            self.channel.close()


def ask(
    address: str,
    secret: str,
    *,
    encrypted: bool,
    connect_s: float = _CONNECT_S,
    answer_s: float = _ANSWER_S,
) -> Answer:
    """Ask whoever listens at ``address``; the caller closes the answer.

    Raises OSError or EOFError if nobody answers in time, AuthenticationError, BootstrapError.
    """
    now = time.monotonic()
    channel = connect_any(
        address, secret, LABEL, now + answer_s, encrypted=encrypted, reach_s=connect_s
    )
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(channel.close)
        said = messages.mapping(channel.receive(now + answer_s))
        coordinator, formed, policy = (
            said.get("coordinator"),
            said.get("formed"),
            said.get("policy"),
        )
        is_here = messages.flag(said, "is_here")
        answer = Answer(
            None
            if coordinator is None
            else messages.whole(said, "coordinator", -_MAX_NUMBER, _MAX_NUMBER),
            channel if is_here else None,
            messages.text(said, "address", _MAX_ADDRESSES),
            None if formed is None else world_of(formed),
            messages.text(said, "rendezvous", _MAX_ADDRESSES),
            None if policy is None else policy_of(policy),
        )
        if is_here:
            cleanup.pop_all()
        return answer


def ask_all(
    addresses: Sequence[str], secret: str, *, encrypted: bool
) -> Generator[tuple[str, Answer | Exception], None, None]:
    """Ask them, a few at a time; yield answers or errors. Those that answers name are asked too.

    The caller closes what it gets; what comes after it has ended the iteration is closed here.
    """
    results: queue.SimpleQueue[tuple[str, Answer | Exception]] = queue.SimpleQueue()
    lock = threading.Lock()
    is_over = False

    def try_one(address: str) -> None:
        result: Answer | Exception
        try:
            result = ask(address, secret, encrypted=encrypted)
        except (AuthenticationError, BootstrapError, EOFError, OSError) as error:
            result = error
        with lock:
            if not is_over:
                results.put((address, result))
            elif isinstance(result, Answer):
                result.close()

    waiting, asked, open_now = list(addresses), set(addresses), 0
    try:
        while waiting or open_now:
            while waiting and open_now < _AT_ONCE:
                target = waiting.pop(0)
                name = f"kolovod asks {target}"
                threading.Thread(target=try_one, args=(target,), name=name, daemon=True).start()
                open_now += 1
            address, result = results.get()
            open_now -= 1
            if isinstance(result, Answer) and result.address and result.address not in asked:
                asked.add(result.address)
                waiting.insert(0, result.address)
            yield address, result
    finally:
        with lock:
            is_over = True
        while not results.empty():
            _, left = results.get()
            if isinstance(left, Answer):
                left.close()
