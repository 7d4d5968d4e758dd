"""The servers in the launcher of an elastic job: the rendezvous, and the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kolovod.coordination.consensus import Proof, World
from kolovod.coordination.coordinator import COME_S, Coordinator
from kolovod.coordination.coordinator_state import FIRST_LAUNCHER, CoordinatorState, first_world
from kolovod.coordination.hosts import Start
from kolovod.launch.elastic_options import ElasticOptions
from kolovod.launch.fleet import Fleet, Meeting
from kolovod.launch.saved_state import SavedState
from kolovod.net.addresses import LOOPBACK, address_of, endpoint, listen, listen_again
from kolovod.net.channel import new_secret
from kolovod.rendezvous.rank_environment import RankEnvironment, local_and_cross
from kolovod.rendezvous.server import RendezvousServer

__all__ = ["ElasticServices"]


class ElasticServices:
    """Both servers, and the facts by which processes find them."""

    def __init__(
        self,
        elastic: ElasticOptions,
        fleet: Fleet,
        first_hosts: Sequence[str],
        environment: Mapping[str, str],
        more_may_come: bool,
        before: SavedState | None,
        formed: Callable[[World, str], None],
        stopped: Callable[[str], None],
        resigned: Callable[[Proof], None],
        hangs: Callable[[int, str], None],
    ) -> None:
        """Listens. The last four: as ``Coordinator`` calls them.

        ``first_hosts``: of the ranks of the first world. ``more_may_come``: whether there may be
        processes on hosts later that ``fleet`` does not know yet. ``before``: of the launcher whose
        part this one takes: its processes find both servers where they were. Raises BootstrapError.
        """
        self._elastic = elastic
        self._fleet = fleet
        self.secret = new_secret() if before is None else before.secret
        self.turn = 0 if before is None else before.turn + 1
        self.first_hosts = tuple(first_hosts)
        self._meeting = Meeting(fleet, environment, more_may_come=more_may_come)
        addresses, port = self._meeting.addresses, self._meeting.port
        self._rendezvous = RendezvousServer(
            self.secret,
            len(first_hosts),
            *addresses,
            port=port,
            at="" if before is None else before.rendezvous,
            turn=self.turn,
            lasting=True,
        )
        # Users who say where other hosts reach this one have opened the next port as well.
        try:
            listeners = (
                listen(addresses or [LOOPBACK], 128, port and port + 1, lasting=True)
                if before is None
                else listen_again(before.coordinator, backlog=128)
            )
        except BaseException:
            self._rendezvous.close()
            raise
        self.coordinator = Coordinator(
            FIRST_LAUNCHER - self.turn,
            CoordinatorState(first_world(enumerate(first_hosts))),
            elastic.policy,
            self.secret,
            listeners,
            formed=formed,
            stopped=stopped,
            resigned=resigned,
            hangs=hangs,
            mark_dead=self._rendezvous.mark_dead,
            end_scopes=self._rendezvous.end_scopes,
            come_s=None if before is None else COME_S,
        )
        self.addresses = self._rendezvous.address, ",".join(map(address_of, listeners))
        """Of the rendezvous, and of the coordinator."""
        self._found: dict[str, tuple[str, str]] = {}  # by host: where they are seen from there

    def start(self) -> None:
        """Begin to answer."""
        self._rendezvous.start()
        self.coordinator.start()

    def close(self) -> None:
        """Stop. Idempotent."""
        self.coordinator.close()
        self._rendezvous.close()

    def find(self, hosts: Iterable[str]) -> None:
        """Note the addresses at which processes on these hosts find both servers."""
        rendezvous, coordinator = self.addresses
        for host in hosts:
            self._found[host] = rendezvous, coordinator
            if self._meeting.host and host in self._fleet.far_hosts:
                self._found[host] = (
                    endpoint(self._meeting.host, self._meeting.port),
                    endpoint(self._meeting.host, self._meeting.port + 1),
                )

    def is_found_from(self, host: str) -> bool:
        """Return whether ``find`` has been called for this host."""
        return host in self._found

    def environment(
        self, start: Start, is_first: bool, process: int, local_rank: int
    ) -> RankEnvironment:
        """Return the environment of a process that is started.

        ``is_first``: it is a rank of the first world. ``process``: the launcher's number for it.
        ``local_rank``: see ``Process``.

        Its rank and size are those of that world; a process that comes later is alone first, or
        with its replica, but not on its host: so its local size is one more than its local rank,
        which is no count of the processes there.
        """
        rendezvous, coordinator = self._found[start.host]
        first_hosts = self.first_hosts if is_first else ()
        numbers = (0, 1, local_rank, local_rank + 1, 0, 1)
        if is_first:
            where = local_and_cross(first_hosts, start.slot)
            numbers = (start.slot, len(first_hosts), *where)
        return RankEnvironment(
            *numbers,
            host=start.host,
            rendezvous=rendezvous,
            secret=self.secret,
            coordinator=coordinator,
            slot=start.slot,
            process=process,
            replica=tuple(self.replica(process, start.slot)),
            first_hosts=first_hosts,
            min_np=self._elastic.min_np,
        )

    def replica(self, process: int, slot: int) -> range:
        """Return the processes that were started with the one of that number, as one replica."""
        size = self._elastic.replica_size
        first = process - slot % size
        return range(first, first + size)

    def torch_server(self, host: str) -> tuple[int, str]:
        """Return port and address for a server that a process on ``host`` starts; see ``Fleet``."""
        return self._fleet.torch_server(host, self._found[host][0])
