"""A member's part in always having a coordinator: it finds the next one, or becomes it.

The launcher is coordinator while it can be reached, else the lowest rank that can. Every member
listens, and says who its coordinator is. One that has lost its coordinator asks the launcher and
all lower members: whoever is a coordinator is its new one; if none of them answers it takes the
part itself, with what it knows from the last one. A coordinator among members looks around as long
as it misses some of them: it steps back for the launcher, for one with a newer world, and for a
lower one. Until then there may be two, which does no harm (``consensus``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kolovod.coordination.consensus import Proof, Record, World
from kolovod.coordination.coordinator import LABEL, Coordinator
from kolovod.coordination.coordinator_state import CoordinatorState, Facts
from kolovod.coordination.membership import Policy
from kolovod.coordination.protocol import Contact, encode_world
from kolovod.elastic.search import Answer, ask, ask_all
from kolovod.errors import AuthenticationError, BootstrapError
from kolovod.net.addresses import address_of, addresses_beside, listen, split_addresses
from kolovod.net.channel import Channel
from kolovod.net.server import Server
from kolovod.notices import report_to_stderr
from kolovod.rendezvous.server import RendezvousServer

__all__ = ["Standby", "Known", "Outside"]

_FIRST_CONNECT_S = 10.0
"""To the launcher, while nobody else is known."""
_SILENT_S = 3.0
"""How long a host that was silent is not asked."""
_LOOK_S = 1.0
"""Between two looks around."""
_SEND_S = 2.0
_SEE_OFF_S = 5.0
_FIRST_COME_S = 10.0
"""For those that a job begins with to come to its first coordinator."""


class Known(NamedTuple):
    """The facts known to the process that the standby belongs to."""

    number: int | None
    record: Record
    proofs: Sequence[Proof]
    """The proofs of others on its host."""

    @property
    def formed(self) -> World | None:
        """The newest world."""
        return self.record.formed

    @property
    def is_member(self) -> bool:
        """True if it is in that world."""
        return self.formed is not None and self.number in self.formed.numbers


class Outside(Protocol):
    """The way in which members find each other without a launcher of ours (external.py)."""

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses at which this process is to listen."""
        ...

    @property
    def policy(self) -> Policy | None:
        """The job's policy, for its first coordinator."""
        ...

    def coordinator(self) -> str:
        """Return the address of a member that knows the coordinator.

        Raises BootstrapError if nobody answers.
        """
        ...

    def close(self) -> None:
        """Tell nobody any more where the coordinator is. Idempotent."""
        ...


class Standby:
    """The standby of one process.

    ``find`` is for one thread; all else that is public is for any.
    """

    def __init__(
        self,
        launcher: str,
        secret: str,
        known: Callable[[], Known],
        *,
        encrypted: bool = False,
        interfaces: Sequence[str] = (),
        outside: Outside | None = None,
    ) -> None:
        """``launcher``: its addresses; "": there is none, but an ``outside``.

        Listens; on the loopback interface, if the launcher does.

        Raises BootstrapError if it cannot, InvalidArgumentError for ``interfaces``.
        """
        self._launcher, self._secret, self._encrypted = launcher, secret, encrypted
        self._known = known
        self._outside = outside
        if outside is not None:
            self._hosts = list(outside.addresses)
        else:
            self._hosts = addresses_beside(launcher, interfaces, 0)
        listeners = listen(self._hosts, backlog=128)
        self.addresses = ",".join(map(address_of, listeners))
        self._servers = [Server(listener, secret, LABEL, self._greet) for listener in listeners]
        self._lock = threading.Lock()
        self._facts: Facts | None = None
        self._policy = Policy()
        self._is_first = False
        """Whether this process becomes coordinator without having followed one."""
        if outside is not None and outside.policy is not None:
            self._policy, self._is_first = outside.policy, True
        self._contacts: dict[int, Contact] = {}
        self._follows: tuple[int, str] | None = None  # the present coordinator, and where it is
        self._hint = ""  # where a coordinator was seen
        self._silent: tuple[frozenset[str], float] = frozenset(), 0.0
        self._acting: _ActingCoordinator | None = None
        self._is_closed = False
        for server in self._servers:
            server.start()

    def close(self) -> None:
        """Stop listening, and being coordinator. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._step_back()
        for server in self._servers:
            server.close()
        if self._outside is not None:
            self._outside.close()

    def retire(self) -> None:
        """The process is no member any more: it stays only if it is coordinator, for the others."""
        if self._acting is None:
            self.close()

    def see_off(self) -> None:
        """Stay, having left the job as its coordinator, while the others need it, or for a while.

        They meet at its rendezvous server; then one of them is coordinator.
        """
        acting = self._acting
        if acting is not None:
            acting.see_off()

    def forget(self) -> None:
        """Close the sockets in a forked child.

        It must not listen in its parent's place, or keep the parent connected.
        """
        for server in self._servers:
            server.forget()
        if self._acting is not None:
            self._acting.coordinator.forget()

    # --- what the coordinator tells ---

    def hear_facts(self, facts: Facts) -> None:
        """Keep the facts that the next coordinator must know."""
        with self._lock:
            self._facts = facts

    def hear_contacts(self, contacts: Sequence[Contact]) -> None:
        """Keep how members are found."""
        with self._lock:
            self._contacts |= {contact.number: contact for contact in contacts}

    def knows(self, world: World) -> bool:
        """Return whether this process could do without the coordinator in ``world``."""
        with self._lock:
            return self._facts is not None and world.numbers <= self._contacts.keys()

    def host_is_silent(self, since_s: float) -> None:
        """Note that the coordinator's host acknowledges nothing: it is not asked for a while."""
        with self._lock:
            number, address = self._follows or (None, "")
            hosts = _hosts_of(address or self._launcher or self.addresses)
            if number is not None and hosts.isdisjoint(_hosts_of(self.addresses)):
                self._silent = hosts, since_s

    @property
    def facts(self) -> Facts | None:
        """The facts that another coordinator gets."""
        with self._lock:
            return self._facts

    # --- who has lost its coordinator ---

    def find(self, told: Callable[[World], None]) -> Answer:
        """Find the coordinator, to which the answer's channel leads; the caller closes that.

        ``told(world)`` is called of worlds that others know as formed. Raises OSError or EOFError
        if none is reached now, AuthenticationError, BootstrapError.
        """
        with self._lock:
            self._follows = None
            hint, self._hint = self._hint, ""
            silent = self._silent
            if time.monotonic() > silent[1] + _SILENT_S:
                silent = frozenset(), 0.0
        known = self._known()
        if known.is_member and self._acting is not None:
            return self._follow(self._ask_own())
        lower, may_lead = self._candidates(known)
        if not lower and not hint and not may_lead:
            if self._outside is None:
                return self._follow(self._ask_launcher())
            hint = self._outside.coordinator()
        answered, refusal = False, ""
        addresses = [*filter(None, [hint, self._launcher]), *lower]
        addresses = [a for a in addresses if silent[0].isdisjoint(_hosts_of(a))]
        found = ask_all(addresses, self._secret, encrypted=self._encrypted)
        with contextlib.closing(found):
            for address, answer in found:
                if isinstance(answer, Exception):
                    if address == self._launcher:
                        refusal = str(answer)
                    continue
                if answer.formed is not None:
                    told(answer.formed)
                if answer.channel is not None:
                    return self._follow(answer, address)
                answered = True
        if answered or not may_lead:  # whoever has answered will be coordinator, or reaches one
            raise ConnectionError(refusal or "others look for it, too")
        self._become_coordinator(known, *silent)
        return self._follow(self._ask_own())

    def _candidates(self, known: Known) -> tuple[list[str], bool]:
        """Return whom to ask (a member: lower ones), and if this process may be coordinator."""
        formed = known.formed
        dead = {proof.number for proof in known.proofs}
        with self._lock:
            contacts, has_facts = dict(self._contacts), self._facts is not None
            if self._facts is not None:
                dead |= self._facts.proofs.keys()
        if formed is None:
            return [], False
        alive = sorted(formed.numbers - dead)
        if known.is_member:
            assert known.number is not None
            alive = [number for number in alive if number < known.number]
        may_lead = known.is_member and all(number in contacts for number in alive)
        may_lead = may_lead and (has_facts or self._is_first)
        return [contacts[n].addresses for n in alive if n in contacts], may_lead

    def _ask_launcher(self) -> Answer:
        return ask(
            self._launcher,
            self._secret,
            encrypted=self._encrypted,
            connect_s=_FIRST_CONNECT_S,
            answer_s=_FIRST_CONNECT_S,
        )

    def _ask_own(self) -> Answer:
        try:
            return ask(self.addresses, self._secret, encrypted=self._encrypted)
        except AuthenticationError as error:  # it has stepped back meanwhile
            raise ConnectionError(str(error)) from error

    def _follow(self, answer: Answer, address: str = "") -> Answer:
        if answer.channel is None or answer.coordinator is None:
            raise ConnectionError("who was coordinator is not any more")
        if address == self._launcher:
            address = ""
        with self._lock:
            self._follows = answer.coordinator, address
            if answer.policy is not None:
                self._policy = answer.policy
        return answer

    def lacks(self, slot: int) -> bool:
        """Return whether this process is coordinator, and no process there fills ``slot``."""
        acting = self._acting
        return acting is not None and not acting.coordinator.is_filled(slot)

    # --- who asks ---

    def _greet(self, channel: Channel) -> None:
        """Greet a caller, on the connection's own thread."""
        with self._lock:
            acting, follows = self._acting, self._follows
        if acting is not None:
            acting.coordinator.greet(channel)
            return
        coordinator, address = follows if follows is not None else (None, "")
        formed = self._known().formed
        answer = {
            "coordinator": coordinator,
            "is_here": False,
            "address": address,
            "formed": None if formed is None else encode_world(formed),
            "rendezvous": "",
            "policy": None,
        }
        channel.send(answer, time.monotonic() + _SEND_S)

    # --- as coordinator ---

    def _become_coordinator(self, known: Known, silent: frozenset[str], since_s: float) -> None:
        """Become coordinator. ``silent``: hosts that have been so since ``since_s``."""
        number, formed = known.number, known.formed
        assert number is not None
        assert formed is not None
        with self._lock:
            if self._is_closed:
                raise ConnectionError("this process ends")
            facts, policy = self._facts, self._policy
            gone = [n for n, c in self._contacts.items() if silent & _hosts_of(c.addresses)]
        state, now = CoordinatorState(formed), time.monotonic()
        if facts is not None:
            state.merge(facts, now)
        state.see(known.record)
        for proof in known.proofs:
            state.prove(proof, now)
        silent_since_s = dict.fromkeys(state.formed.numbers.intersection(gone), since_s)
        is_first, self._is_first = self._is_first, False
        acting = _ActingCoordinator(
            number,
            state,
            policy,
            self._secret,
            self._hosts,
            silent_since_s,
            _FIRST_COME_S if is_first else 0.0,
            self._look_around,
        )
        try:
            with self._lock:
                if self._is_closed:  # meanwhile
                    raise ConnectionError("this process ends")
                acting.start()
                self._acting = acting
        except BaseException:
            acting.close()
            raise
        if not is_first:
            acting.announce()

    def _look_around(self, acting: _ActingCoordinator) -> bool:
        """Return whether this process stays coordinator.

        If a coordinator answers that must be followed, it steps back.
        """
        missing = acting.coordinator.misses()
        own = acting.coordinator.world
        with self._lock:
            addresses = [c.addresses for n, c in self._contacts.items() if n in missing]
        addresses = [*filter(None, [self._launcher]), *addresses]
        found = ask_all(addresses, self._secret, encrypted=self._encrypted)
        with contextlib.closing(found):
            for address, answer in found:
                if isinstance(answer, Exception) or answer.coordinator is None:
                    continue
                answer.close()
                at_launcher = bool(self._launcher) and address == self._launcher
                if at_launcher or _goes_before(answer, own, acting.number):
                    with self._lock:
                        self._hint = "" if at_launcher else answer.address or address
                    self._step_back()
                    return False
        return True

    def _step_back(self) -> None:
        """Give up being coordinator: its members, this one too, look for another."""
        with self._lock:
            acting, self._acting = self._acting, None
        if acting is not None:
            acting.close()


def _hosts_of(addresses: str) -> frozenset[str]:
    return frozenset(host for host, _ in split_addresses(addresses))


def _goes_before(answer: Answer, own: World, number: int) -> bool:
    """Return whether another coordinator is the one to follow."""
    assert answer.coordinator is not None
    if answer.coordinator < 0:  # a launcher that this one cannot reach
        return False
    if answer.formed is not None and answer.formed.stamp != own.stamp:
        return answer.formed.stamp > own.stamp
    return answer.coordinator < number


class _ActingCoordinator:
    """The coordinator in a member's process, and a rendezvous server for its worlds."""

    def __init__(
        self,
        number: int,
        state: CoordinatorState,
        policy: Policy,
        secret: str,
        hosts: Sequence[str],
        silent_since_s: Mapping[int, float],
        come_s: float,
        look_around: Callable[[_ActingCoordinator], bool],
    ) -> None:
        """``silent_since_s``, ``come_s``: see Coordinator.

        ``look_around(self)``: whether to go on; called on a thread of its own.
        """
        self.number = number
        self._look_around = look_around
        self._rendezvous = RendezvousServer(secret, len(state.formed.members), *hosts)
        self.coordinator = Coordinator(
            number,
            state,
            policy,
            secret,
            formed=self._formed,
            stopped=lambda reason: report_to_stderr(f"ending the job: {reason}"),
            mark_dead=self._rendezvous.mark_dead,
            end_scopes=self._rendezvous.end_scopes,
            rendezvous=self._rendezvous.address,
            come_s=come_s,
            silent_since_s=silent_since_s,
        )
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kolovod standby", daemon=True)

    def start(self) -> None:
        """Answer."""
        self._rendezvous.start()
        self.coordinator.start()
        self._thread.start()

    def announce(self) -> None:
        """Say that another coordinator was there before."""
        report_to_stderr(
            f"the job's coordinator cannot be reached: rank {self._rank()} takes its part from "
            "now on"
        )

    def see_off(self) -> None:
        """Stay until the newest world has formed without this process, or a while."""
        world = self.coordinator.world
        if self.number not in world.numbers and len(world.members) > 1:
            self._rendezvous.wait_formed(world.epoch, _SEE_OFF_S)

    def close(self) -> None:
        """Stop being coordinator. Idempotent."""
        self._closed.set()
        self.coordinator.close()
        self._rendezvous.close()

    def _rank(self) -> int:
        members = self.coordinator.world.members
        return [member.number for member in members].index(self.number)

    def _formed(self, world: World, reason: str) -> None:
        report_to_stderr(world.announcement(reason))

    def _watch(self) -> None:
        said = ""
        while not self._closed.wait(_LOOK_S):
            try:
                if not self._look_around(self):
                    return
            except (BootstrapError, OSError, RuntimeError) as error:
                # An address that makes no sense, too many open files, or no more threads.
                if str(error) != said:
                    said = str(error)
                    report_to_stderr(f"looking for the launcher has failed: {error}")
