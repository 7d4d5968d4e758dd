"""The meeting point of the ranks of an elastic job that Ray Train starts, and starts again.

It is an actor, and does what the launcher of another elastic job does: it is the coordinator, and
has the rendezvous. It is told which processes there are, and how they have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from kolovod.coordination import record_file
from kolovod.coordination.consensus import NOTHING, Proof, World
from kolovod.coordination.coordinator import Coordinator
from kolovod.coordination.coordinator_state import FIRST_LAUNCHER, CoordinatorState, first_world
from kolovod.coordination.membership import PREPARE_S, Policy
from kolovod.net.addresses import address_of, listen, own_addresses
from kolovod.net.channel import new_secret
from kolovod.notices import report_to_stderr
from kolovod.rendezvous.server import RendezvousServer

__all__ = ["Addresses", "ElasticMeeting", "Over"]

# The coordinator's number of a launcher that has come later. To the first one members do not report
# who has died beside them, since it sees that itself: Train looks every two seconds only.
_NUMBER = FIRST_LAUNCHER - 1


class Addresses(NamedTuple):
    """The addresses and the secret by which a process finds the others."""

    rendezvous: str
    coordinator: str
    secret: str


class Over(NamedTuple):
    """The state of the job: whether it has ended."""

    reason: str
    """"" while it goes on."""
    is_well: bool
    """True: ranks have come to the end of their functions."""


class ElasticMeeting:
    """The meeting of the processes 0 to N - 1, which begin the job, and of later ones."""

    def __init__(self, hosts: Sequence[str], min_np: int, elastic_timeout_s: float) -> None:
        """``hosts``: of the ranks that begin the job, by rank, which is a slot's number, too."""
        self._first = range(len(hosts))
        self._stopped_by = ""
        self._is_well = False
        self._ended: set[int] = set()
        secret, addresses = new_secret(), own_addresses()
        self._rendezvous = RendezvousServer(secret, len(hosts), *addresses)
        listeners = listen(addresses, backlog=128)
        coordinator = ",".join(map(address_of, listeners))
        self._addresses = Addresses(self._rendezvous.address, coordinator, secret)
        self._coordinator = Coordinator(
            _NUMBER,
            CoordinatorState(first_world(enumerate(hosts))),
            Policy(
                min_np=min_np,
                max_np=len(hosts),
                elastic_timeout_s=elastic_timeout_s,
                prepare_s=PREPARE_S,
            ),
            secret,
            listeners,
            formed=self._formed,
            stopped=self._stopped,
            mark_dead=self._rendezvous.mark_dead,
            end_scopes=self._rendezvous.end_scopes,
        )
        self._rendezvous.start()
        self._coordinator.start()

    def told(self) -> Addresses:
        """Return the addresses at which it listens."""
        return self._addresses

    def over(self) -> Over:
        """Return whether the job has ended, and how."""
        return Over(self._stopped_by, self._is_well)

    def ended(self, process: int, cause: str, record: bytes, is_well: bool = False) -> None:
        """A process has ended, or is no rank any more. Only the first word of each counts.

        ``record``: what it had agreed to (``record_file.read``). ``is_well``: its function has
        returned.
        """
        if process in self._ended:
            return
        self._ended.add(process)
        number = self._coordinator.number_of(process)
        if number is None and process in self._first:
            number = process
        if number is None:
            return
        self._is_well |= is_well and number in self._coordinator.world.numbers
        left = record_file.parse(record) or NOTHING
        self._coordinator.prove(Proof(number, cause, left, has_finished=is_well))

    def _formed(self, world: World, reason: str) -> None:
        """Say that a world has formed, on the coordinator's thread."""
        report_to_stderr(world.announcement(reason))

    def _stopped(self, reason: str) -> None:
        """Note the end, on the coordinator's thread: that must end before it can be closed."""
        self._stopped_by = reason
        # It would keep whoever comes now waiting.
        threading.Thread(target=self._coordinator.close, daemon=True).start()
