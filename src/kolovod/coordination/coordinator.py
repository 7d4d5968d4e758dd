"""The coordinator of an elastic job: a thread that hears all, and asks for the next world.

``membership.decide`` says what follows from what it knows; here are the connections, the clock and
the order in which things happen. Members connect and stay connected (protocol.py); whoever starts
them says when a process has ended. Members hear all that another coordinator needs (standby.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kolovod.coordination.consensus import Member, Proof, World
from kolovod.coordination.coordinator_state import CoordinatorState
from kolovod.coordination.hanging import Hanging
from kolovod.coordination.membership import (
    Ask,
    Formed,
    Policy,
    Prepare,
    Propose,
    Stop,
    Wait,
    decide,
    let_go,
)
from kolovod.coordination.pending_joins import Newcomer, PendingJoins
from kolovod.coordination.protocol import (
    Contact,
    encode_contact,
    encode_facts,
    encode_member,
    encode_policy,
    encode_reason,
    encode_world,
    hello_of,
    list_of,
    proof_of,
    reason_of,
    record_of,
    stamp_of,
)
from kolovod.errors import AuthenticationError, BootstrapError, ElasticBootstrapError
from kolovod.net import messages
from kolovod.net.channel import Channel
from kolovod.net.lost_hosts import UNACKNOWLEDGED_S, HostWatch, notice_lost_host
from kolovod.net.server import Server
from kolovod.rendezvous import versions

__all__ = ["COME_S", "LABEL", "Coordinator"]

LABEL = "coordinator"
BEAT_S = 0.25
"""Between two messages to a member at most: where its host is gone, nothing acknowledges them."""
COME_S = 5.0
"""For members of a world that formed elsewhere to find a coordinator: they look once a second."""
_SEND_S = 2.0
_HELLO_S = 10.0
_FINISHED_GRACE_S = 1.0
"""For the others to end as well, when one process has ended well."""
_RESIGNED_GRACE_S = 0.5
"""For the others to do so as well, when one has resigned: an exception may leave all functions at
the same step, and who is late would be taken out of it. Its process's end is not waited for."""
_MAX_SLOT = 1 << 53
_CONTACTS_PER_MESSAGE = 1000


@dataclass
class _Connection:
    """The connection of a member."""

    channel: Channel
    watch: HostWatch
    asked: Any = None
    """The last question that it was sent."""
    owes_answer: bool = False
    is_urgent: bool = False
    """Whether it is to answer at once, whatever its script does."""
    said_s: float = 0.0
    facts_told: Any = None
    contacts_told: int = 0


class Coordinator:
    """A thread that runs from ``start`` to ``close``. Its methods may be called on any thread."""

    def __init__(
        self,
        number: int,
        state: CoordinatorState,
        policy: Policy,
        secret: str,
        listeners: Sequence[socket.socket] = (),
        *,
        formed: Callable[[World, str], None],
        stopped: Callable[[str], None],
        resigned: Callable[[Proof], None] = lambda proof: None,
        hangs: Callable[[int, str], None] = lambda number, reason: None,
        mark_dead: Callable[[int, str, int], None] = lambda rank, cause, epoch: None,
        end_scopes: Callable[[int], None] = lambda before: None,
        rendezvous: str = "",
        come_s: float | None = None,
        silent_since_s: Mapping[int, float] = {},
    ) -> None:
        """``number``: the coordinator's own, see coordinator_state.py. Takes over the listeners.

        ``formed(world, reason)``, ``stopped(reason)``, where a member gives up ``resigned(proof)``
        and where one hangs (``hanging``) ``hangs(number, reason)`` are called on its thread.
        ``mark_dead``, ``end_scopes``: of the rendezvous server, which is at ``rendezvous``; "":
        where the job began. ``come_s``: after how long members that have not come count as silent,
        where another coordinator was before; None: they may still be starting. ``silent_since_s``:
        of members known to be so.
        """
        self._number = number
        self._state = state
        self._policy = policy
        self._formed, self._stopped, self._resigned = formed, stopped, resigned
        self._mark_dead, self._end_scopes = mark_dead, end_scopes
        self._here = {
            "coordinator": number,
            "is_here": True,
            "address": "",
            "rendezvous": rendezvous,
            "policy": encode_policy(policy),
        }
        self._lock = threading.RLock()  # of the state and of what follows
        self._connections: dict[int, _Connection] = {}
        self._pending_joins = PendingJoins()
        self._contacts: dict[int, Contact] = {}  # by how many had come before it
        self._contacts_come = 0
        self._due: list[tuple[float, Proof]] = []  # that wait for others, and until when
        self._hanging = Hanging(hangs, policy.hang_s)
        self._ending: set[int] = set()  # whose function has come to its end
        self._announced: set[int] = set()  # slots of which members hear before they are filled
        self._are_others_told = False  # whether members think that others come
        self._formed_told = state.formed.stamp  # of the world that all members were told of
        self._come_s = come_s
        for member, since_s in silent_since_s.items():
            state.miss(member, since_s)
        self._come_by_s = math.inf
        self._awaited = state.formed.stamp  # the newest world whose members are waited for
        self._is_closed = False
        self._has_stopped = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kolovod coordinator", daemon=True)
        self._servers = [Server(listener, secret, LABEL, self.greet) for listener in listeners]

    def start(self) -> None:
        """Begin to hear members, and to decide."""
        if self._come_s is not None:
            self._come_by_s = time.monotonic() + self._come_s
        for server in self._servers:
            server.start()
        self._thread.start()

    def close(self) -> None:
        """Hang up. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._ring()
        if self._thread.ident is not None:
            self._thread.join()
        for server in self._servers:
            server.close()
        for connection in self._connections.values():
            connection.channel.close()
        for newcomer in self._pending_joins.take():
            newcomer.channel.close()
        os.close(self._bell)

    def forget(self) -> None:
        """Let go of the members' connections in a forked child, which must not keep them open."""
        for connection in list(self._connections.values()):
            connection.channel.forget()

    # --- what others know ---

    def prove(self, proof: Proof) -> None:
        """Take the proof that a member has ended.

        If it has finished, the others get a moment to do so, too.
        """
        with self._lock:
            self._prove(proof)
        self._ring()

    def leave(self, numbers: Collection[int]) -> None:
        """Let these members leave at the next step that all ranks share."""
        with self._lock:
            for number in numbers:
                self._state.leave(number, time.monotonic())
        self._ring()

    def lets_leave(self, number: int) -> bool:
        """Return whether that member is to leave, and its function has not ended before."""
        with self._lock:
            return number in self._state.leaving and number not in self._ending

    def has_let_go(self, number: int) -> bool:
        """Return whether a world has formed without that member since it was to leave."""
        with self._lock:
            is_gone = number not in self._state.formed.numbers
            return is_gone and number in self._state.leaving and number not in self._ending

    def set_hosts(self, refused: Collection[str], unwanted: Collection[str]) -> None:
        """Set the hosts that get no new members, and those whose members shall leave, too."""
        with self._lock:
            self._state.refused_hosts = frozenset(refused)
            self._state.unwanted_hosts = frozenset(unwanted)
        self._ring()

    def expect(self, slot: int, comes: bool, *, is_news: bool = False) -> None:
        """Note that a process was started that will fill ``slot``, or that it has ended.

        ``is_news``: members are told at once, and not only of the world with it.
        """
        with self._lock:
            (self._state.coming.add if comes else self._state.coming.discard)(slot)
            (self._announced.add if comes and is_news else self._announced.discard)(slot)
        self._ring()

    def avoid(self, host: str) -> None:
        """Add a host that gets no new members, and whose members leave (see ``set_hosts``)."""
        with self._lock:
            self._state.refused_hosts |= {host}
            self._state.unwanted_hosts |= {host}
        self._ring()

    def number_of(self, process: int) -> int | None:
        """Return the member that its launcher calls ``process``; None: it has not come."""
        with self._lock:
            return self._pending_joins.number_of(process)

    def has_left_behind(self, number: int) -> bool:
        """Return whether a world has formed without that member since nobody there heard of it."""
        with self._lock:
            return number in self._state.left_behind and number not in self._state.proofs

    def goes_on_without(self, number: int) -> bool:
        """Return whether that member is in the world no more, though it has not ended or left.

        It is False until a member of that world is here, and has told of later ones.
        """
        with self._lock:
            state, members = self._state, self._state.formed.numbers
            known = (members, state.entrants, state.proofs, state.leaving, self._ending)
            is_newest = not members.isdisjoint(self._connections)
            return is_newest and not any(number in numbers for numbers in known)

    def is_in_the_way(self, number: int) -> bool:
        """Return whether that process waits for a slot whose member in the newest world lives."""
        with self._lock:
            waiting = self._state.entrants.get(number)
            return waiting is not None and any(
                member.slot == waiting.slot and member.number in self._connections
                for member in self._state.formed.members
            )

    def is_filled(self, slot: int) -> bool:
        """Return whether the last process that has come to fill ``slot`` is connected."""
        with self._lock:
            return self._pending_joins.last_in(slot) in self._connections

    @property
    def world(self) -> World:
        """The newest world that has formed."""
        with self._lock:
            return self._state.formed

    def misses(self) -> frozenset[int]:
        """Return the newest world's members that are not connected, nor known to have ended."""
        with self._lock:
            state = self._state
            return state.formed.numbers - self._connections.keys() - state.proofs.keys()

    # --- the thread ---

    def _ring(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def greet(self, channel: Channel) -> None:
        """Say who is here, and hear who has come, on the connection's own thread."""
        here = {**self._here, "formed": encode_world(self.world)}
        channel.send(here, time.monotonic() + _SEND_S)
        message = channel.receive(time.monotonic() + _HELLO_S)
        try:
            if (other := versions.find_other(message)) is not None:
                ours = f"its launcher {versions.OURS}: {versions.ADVICE}"
                raise ElasticBootstrapError(f"this rank has {other}, {ours}")
            hello = hello_of(message)
        except BootstrapError as error:
            channel.send({"stop": encode_reason(str(error))}, time.monotonic() + _SEND_S)
            return
        with self._lock:
            if self._is_closed:
                return
            kept = channel.keep()
            notice_lost_host(kept.fileno())
            self._pending_joins.add(Newcomer(kept, hello, self._state.formed.numbers))
        self._ring()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a defect: without a coordinator all would wait for ever
            self._stopped(f"the job's coordinator has failed: {error!r}")
            raise

    def _serve(self) -> None:
        while True:
            with self._lock:
                if self._is_closed:
                    return
                self._let_in()
                self._prove_replaced()
                due_s = self._prove_due()
                self._miss_silent()
                until_s = self._decide()
                self._hanging.expect(self._debtors(), time.monotonic())
                self._hanging.tell(self._state.proofs, self._connections, time.monotonic())
                self._tell_formed()
                self._tell_of_others()
                for number in [n for n, c in self._connections.items() if c.channel.fileno() < 0]:
                    self._lose(number)
                fds = {c.channel.fileno(): n for n, c in self._connections.items()}
                self._beat()
            poll = select.poll()
            for fd in (self._bell, *fds):
                poll.register(fd, select.POLLIN)
            now = time.monotonic()
            wait_s = min([BEAT_S, *(s - now for s in (until_s, due_s) if s is not None)])
            ready = [fd for fd, _ in poll.poll(max(0.0, wait_s) * 1000 + 1)]
            with self._lock:
                for fd in ready:
                    if fd == self._bell:
                        os.eventfd_read(self._bell)
                    else:
                        self._hear(fds[fd])

    def _miss_silent(self) -> None:
        """Take members that have not come in time for silent.

        A world's members have some time to come, also if the world is heard of later.
        """
        now, world = time.monotonic(), self._state.formed
        if world.stamp != self._awaited:
            self._awaited = world.stamp
            if world.ballot.coordinator != self._number:  # else all that are alive are connected
                self._come_by_s = min(self._come_by_s, now + COME_S)
        if now >= self._come_by_s:
            self._come_by_s = math.inf
            for number in self.misses():
                self._state.miss(number, now)

    def _prove(self, proof: Proof) -> None:
        """Take a proof, under the lock."""
        if proof.has_finished:
            self._due.append((time.monotonic() + _FINISHED_GRACE_S, proof))
        else:  # if it has resigned it has said why
            said = (earlier for _, earlier in self._due if earlier.number == proof.number)
            self._bury(next(said, proof))

    def _prove_due(self) -> float | None:
        """Take the proofs that have waited long enough; return when to look again."""
        now = time.monotonic()
        if self._state.formed.numbers <= self._waiting() | self._state.proofs.keys():
            now = math.inf  # nobody is left to wait for
        due, self._due = self._due, [(at, proof) for at, proof in self._due if at > now]
        for at, proof in due:
            if at <= now:
                self._bury(proof)
        return min((at for at, _ in self._due), default=None)

    def _bury(self, proof: Proof) -> None:
        self._state.prove(proof, time.monotonic())
        self._drop(proof.number)
        world = self._state.formed  # whose members shall not wait for this one
        for rank, member in enumerate(world.members):
            if member.number == proof.number:
                self._mark_dead(rank, proof.cause, world.epoch)

    def _let_in(self) -> None:
        came: list[int] = []
        for newcomer in self._pending_joins.take():
            channel, hello = newcomer.channel, newcomer.hello
            if hello.facts is not None:
                self._state.merge(hello.facts, time.monotonic())
            if hello.number is None:
                member = self._state.enter(hello.slot, hello.host, time.monotonic())
            else:
                member = Member(hello.number, hello.slot, hello.host)
            if member is None:  # no number can be given yet
                self._pending_joins.add(newcomer)
                continue
            number = member.number
            if number in self._state.proofs:
                self._dismiss(channel, f"member {number} is known to have ended")
                continue
            self._drop(number)
            connection = self._connections[number] = _Connection(
                channel, HostWatch(channel.fileno())
            )
            self._pending_joins.fill(member, hello.process)
            self._state.coming.discard(member.slot)
            self._state.hear(number)
            self._state.see(hello.record)
            self._keep_contact(hello.contact._replace(number=number))
            world = encode_world(self._state.formed)
            self._send(number, connection, {"you": encode_member(member), "formed": world})
            came.append(number)
        if came and self._state.formed.numbers <= self._connections.keys():
            self._tell_news(list(self._connections))  # with which all know each other
        elif came:
            self._tell_news(came)

    def _prove_replaced(self) -> None:
        """Declare members dead whose slot has a newer process and whose connection is gone."""
        if not self._policy.replaced_are_dead:
            return
        for member in self._state.formed.members:
            if member.number in self._connections or not self._pending_joins.follow(member):
                continue
            known = self._state.proofs.get(member.number)
            record = self._pending_joins.record_of(member)
            if known is None or (known.record is None and record is not None):
                cause = "another process has come in its place"
                self._bury(Proof(member.number, cause, record))

    def _dismiss(self, channel: Channel, reason: str) -> None:
        with contextlib.suppress(OSError):
            channel.send({"stop": encode_reason(reason)}, time.monotonic() + _SEND_S)
        channel.close()

    def _drop(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is not None:
            connection.channel.close()

    def _send(self, number: int, connection: _Connection, message: Any) -> None:
        connection.said_s = time.monotonic()
        try:
            connection.channel.send(message, connection.said_s + _SEND_S)
        except TimeoutError:
            self._lose(number, UNACKNOWLEDGED_S)
        except OSError:
            pass  # it is closed, and readable: what it has said last is heard before

    def _lose(self, number: int, silent_s: float = 0.0) -> None:
        """Note that a member's connection is broken. ``silent_s``: how long its host was silent."""
        self._drop(number)
        if number not in self._waiting():  # else it is known why
            self._state.miss(number, time.monotonic() - silent_s)

    def _waiting(self) -> set[int]:
        """Return the members of which there is a proof that waits for others."""
        return {proof.number for _, proof in self._due}

    def _beat(self) -> None:
        now = time.monotonic()
        silent = [n for n, c in self._connections.items() if c.watch.due_s() <= now]
        for number in silent:
            self._lose(number, UNACKNOWLEDGED_S)
        due = [n for n, c in self._connections.items() if now - c.said_s >= BEAT_S]
        self._tell_news(due)
        for number in due:
            if (connection := self._connections.get(number)) is not None:
                self._send(number, connection, {"alive": True})

    def _tell_news(self, numbers: Collection[int]) -> None:
        """Send what another coordinator must know, as far as it has changed since each was told."""
        version = self._state.version()
        facts: dict[str, Any] | None = None
        for number in numbers:
            connection = self._connections.get(number)
            if connection is not None and connection.facts_told != version:
                connection.facts_told = version
                facts = facts or {"facts": encode_facts(self._state.facts())}
                self._send(number, connection, facts)
            if connection is None or connection.contacts_told == self._contacts_come:
                continue
            untold = [c for at, c in self._contacts.items() if at >= connection.contacts_told]
            connection.contacts_told = self._contacts_come
            for at in range(0, len(untold), _CONTACTS_PER_MESSAGE):
                rows = [encode_contact(c) for c in untold[at : at + _CONTACTS_PER_MESSAGE]]
                self._send(number, connection, {"contacts": rows})

    def _keep_contact(self, contact: Contact) -> None:
        """Keep how a member is found; of those that have ended what nobody may ask for any more."""
        self._contacts[self._contacts_come] = contact
        self._contacts_come += 1
        if len(self._contacts) > 2 * len(self._connections) + _CONTACTS_PER_MESSAGE:
            gone = self._state.proofs.keys() - self._state.formed.numbers
            newest = {c.number: at for at, c in self._contacts.items() if c.number not in gone}
            self._contacts = {at: self._contacts[at] for at in newest.values()}

    def _hear(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            message = connection.channel.receive(time.monotonic() + _SEND_S)
            self._take(number, messages.mapping(message))
        except TimeoutError:
            self._lose(number, UNACKNOWLEDGED_S)
        except (EOFError, OSError, AuthenticationError):
            self._lose(number)
        except BootstrapError as error:  # it would say it again
            self._dismiss(connection.channel, str(error))
            self._lose(number)

    def _take(self, number: int, message: dict[str, Any]) -> None:
        state, now = self._state, time.monotonic()
        if "promised" in message or "agreed" in message:
            self._connections[number].owes_answer = False
            self._hanging.hear(number)
        if "promised" in message:
            state.promised(number, record_of(message["promised"]))
        elif "agreed" in message:
            state.agreed(number, stamp_of(message["agreed"]), record_of(message.get("record")))
        elif "prepared" in message:
            works = messages.flag(message, "works")
            state.prepared(number, stamp_of(message["prepared"]), works)
        elif "resigns" in message:  # it agrees to nothing any more, as one that is dead
            cause = reason_of(message, "resigns")
            proof = Proof(number, cause, record_of(message.get("record")))
            self._due.append((now + _RESIGNED_GRACE_S, proof))
            self._resigned(proof)
        elif "proofs" in message:
            for proof in list_of(message["proofs"], proof_of, "proofs"):
                self._take_proof(proof)
        elif "alive" in message:
            state.see(record_of(message["alive"]))
            if messages.flag(message, "has_state"):
                state.has_state.add(number)
            epoch = messages.whole(message, "epoch", 0, _MAX_SLOT)
            self._hanging.see(epoch, number)
            if messages.flag(message, "leaves"):
                state.leave(number, now)
            stops, late = messages.flag(message, "stops"), None
            if stops:
                state.stopped[number] = epoch
            if messages.flag(message, "ends"):
                self._ending.add(number)
            broken = reason_of(message, "broken")
            if broken:
                unreached = None
                if message.get("unreached") is not None:
                    unreached = messages.whole(message, "unreached", 0, _MAX_SLOT)
                state.fail(epoch, broken, now, number, unreached)
                late = unreached if messages.flag(message, "late") else None
            if broken or stops:
                why = broken or "its ranks have stopped for the next one"
                members = state.formed.numbers if state.formed.epoch == epoch else frozenset()
                self._hanging.note(epoch, number, late, why, now, members - self._ending)

    def _take_proof(self, proof: Proof) -> None:
        """Take a proof from a member on the same host.

        It may have seen the end before the connection broke.
        """
        if proof.number not in self._state.proofs and proof.number not in self._waiting():
            self._prove(replace(proof, has_finished=proof.number in self._ending))

    def _decide(self) -> float | None:
        """Do what there is to do; return when to look again if nothing happens."""
        while not self._has_stopped:
            now = time.monotonic()
            decision = decide(self._state, self._number, self._policy, now)
            if isinstance(decision, Ask):
                self._state.stand(decision.ballot)
                ask = {"ask": list(decision.ballot)}
                self._question(decision.numbers, ask, decision.ballot, urgent=True)
                return now + BEAT_S
            if isinstance(decision, Prepare):
                self._state.prepare(decision.world, now)
                question = {"prepare": encode_world(decision.world)}
                self._question(decision.numbers, question, ("prepare", decision.world.stamp))
                return min(now + BEAT_S, decision.until_s)
            if isinstance(decision, Propose):
                self._state.propose(
                    decision.world, decision.numbers, decision.urgent, decision.reason
                )
                message = {
                    "propose": encode_world(decision.world),
                    "urgent": decision.urgent,
                    "reason": encode_reason(decision.reason),
                }
                mark = (decision.world.stamp, decision.urgent)
                self._question(decision.numbers, message, mark, urgent=decision.urgent)
                return now + BEAT_S
            if isinstance(decision, Formed):
                self._state.declare(decision.world, now)
                self._tell_formed(decision.reason)
                self._formed(decision.world, decision.reason)
            elif isinstance(decision, Wait):
                return decision.until_s
            elif isinstance(decision, Stop):
                self._has_stopped = True
                self._tell({"stop": encode_reason(decision.reason)}, decision.reason)
                for newcomer in self._pending_joins.take():
                    self._dismiss(newcomer.channel, decision.reason)
                self._stopped(decision.reason)
        return None

    def _tell_formed(self, reason: str = "") -> None:
        """Tell of the newest world, even if it has formed elsewhere.

        It may have left out members that are connected here.
        """
        world = self._state.formed
        if world.stamp != self._formed_told:
            self._formed_told = world.stamp
            leaving = let_go(world.basis, self._state, self._policy.replica_size)
            self._are_others_told = self._do_others_come()
            message = {"formed": encode_world(world), "others_come": self._are_others_told}
            self._tell(message, reason, leaving)
            self._end_scopes(world.epoch)  # who cannot be reached would be waited for there

    def _do_others_come(self) -> bool:
        """Return whether a slot that is announced is not in the newest world yet."""
        return bool(self._announced - {member.slot for member in self._state.formed.members})

    def _tell_of_others(self) -> None:
        if self._do_others_come() != self._are_others_told:
            self._are_others_told = not self._are_others_told
            self._tell({"others_come": self._are_others_told}, "")

    def _question(
        self, numbers: Collection[int], message: Any, mark: object, *, urgent: bool | None = None
    ) -> None:
        """Send a question to those who are connected and have not been asked it.

        ``urgent``: their clients answer at once; if not, when their scripts have stopped. None:
        the answer takes its time.
        """
        for number in numbers:
            connection = self._connections.get(number)
            if connection is None and number not in self._state.formed.numbers:
                self._state.miss(number, time.monotonic())  # it came to another coordinator
            elif connection is not None and connection.asked != mark:
                connection.asked = mark
                connection.owes_answer, connection.is_urgent = urgent is not None, bool(urgent)
                self._send(number, connection, message)

    def _debtors(self) -> list[int]:
        """Return those who have not answered yet though their clients answer by themselves."""
        epoch = self._state.formed.epoch
        return [
            number
            for number, connection in self._connections.items()
            if connection.owes_answer
            and (
                connection.is_urgent
                or self._state.stopped.get(number) == epoch
                or self._hanging.has_noticed(epoch, number)
            )
        ]

    def _tell(self, message: dict[str, Any], reason: str, leaving: Collection[int] = ()) -> None:
        # The process of this thread last: told that the job is over it may end, and this thread.
        own_last = sorted(self._connections.items(), key=lambda each: each[0] == self._number)
        for number, connection in own_last:
            told = {"reason": encode_reason(reason), "is_let_go": number in leaving}
            self._send(number, connection, {**told, **message})
