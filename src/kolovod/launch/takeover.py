"""The passage from one launcher of a job to the next: what it finds, and what it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kolovod.errors import BootstrapError, HostError
from kolovod.launch.avoided_hosts import Process
from kolovod.launch.elastic_services import ElasticServices
from kolovod.launch.fleet import Fleet
from kolovod.launch.saved_state import Persistence, SavedState, newest

__all__ = ["find", "leave"]


def find(
    fleet: Fleet,
    persistence: Persistence,
    report: Callable[[str], None],
    known: Callable[[SavedState, dict[int, Process]], None],
    is_stopped: Callable[[], bool],
) -> SavedState | None:
    """Reach this host's agent, and those that an earlier launcher has started.

    Returns what that has kept; None: there was none. ``known(kept, processes)`` is called before
    output of these processes can come. Raises BootstrapError.
    """
    try:
        here = fleet.reach_here()
    except BootstrapError:  # it has ended, and so has left no trace
        if not (persistence.goes_on and persistence.hosts()):
            raise
        here = fleet.reach_here(anew=True)
    if not persistence.goes_on:
        return None
    before = newest([here.kept])
    if before is None:
        before = _kept_elsewhere(fleet, persistence, report, is_stopped)
    if before is None:
        here.close()  # it is new, and nobody needs it
        raise HostError("no agent that is reached knows of the job")
    now = time.monotonic()
    known(
        before,
        {
            number: Process(slot, host, now, member, local_rank, has_resigned)
            for number, (slot, host, member, local_rank, has_resigned) in enumerate(
                before.processes
            )
        },
    )
    # Names of this host, too: else nobody notices for which slots its agent is needed when it ends.
    names_here = [host for host in before.places if not fleet.is_far(host)]
    try:
        fleet.connect([*before.hosts, *names_here], is_stopped)
    except BootstrapError as error:
        report(str(error))
    fleet.miss(before.hosts)  # what runs there goes on
    report(f"this launcher goes on with {len(fleet.running)} processes of an earlier one")
    return before


def _kept_elsewhere(
    fleet: Fleet,
    persistence: Persistence,
    report: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> SavedState | None:
    """Return what agents on other hosts have: that of this one is new. None: nothing."""
    hosts = list(persistence.hosts())
    are_reached = True
    try:
        fleet.connect(hosts, is_stopped)
    except BootstrapError as error:
        are_reached = False
        report(str(error))
    before = newest(remote.kept for remote in fleet.remote.values())
    if before is None:
        if are_reached and not is_stopped():
            persistence.note_hosts([])  # nothing is left of the job
        return None
    report(
        "the agent of this host was killed, and its ranks with it; an agent on another host has "
        "told this launcher of the job"
    )
    return before


def leave(
    fleet: Fleet,
    persistence: Persistence,
    services: ElasticServices,
    places: Mapping[str, int],
    processes: Mapping[int, Process],
    *,
    edition: int,
    ended_well: bool,
    left: Mapping[int, str],
) -> None:
    """Let the next launcher know what there is; called before it is."""
    rendezvous, coordinator = services.addresses
    kept = SavedState(
        list(persistence.again),
        services.turn,
        edition,
        services.secret,
        rendezvous,
        coordinator,
        list(services.first_hosts),
        sorted(fleet.far_hosts),
        dict(places),
        [[p.slot, p.host, p.member, p.local_rank, p.has_resigned] for p in processes.values()],
        ended_well,
        [[slot, host] for slot, host in left.items()],
    )
    persistence.note_hosts(kept.hosts)
    fleet.keep(kept)
