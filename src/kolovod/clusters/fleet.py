"""The hosts of a job where a cluster's scheduler starts the processes.

A scheduler owes the six methods of ``Cluster``; the job around it is that of other hosts
(``launch.job``, ``launch.elastic_job``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from kolovod.launch.exit_queue import ExitQueue
from kolovod.launch.fleet import Fleet, Group, Sink
from kolovod.launch.local import Ended, Order

__all__ = ["Cluster", "ClusterFleet", "Reached", "Told"]


_AT_ONCE = 32
"""Hosts that are reached at the same time."""


@dataclass(frozen=True)
class Reached:
    """A host on which processes can be started."""

    address: str
    """The address by which other hosts find it."""
    torch_port: int
    """The port of its server for PyTorch, see ``Fleet.torch_server``."""


@dataclass(frozen=True)
class Told:
    """The functions that are told, on any thread, what becomes of a process."""

    began: Callable[[int, int], None]
    """Called when it runs, with its number and its process id."""
    ended: Callable[[Ended], None]
    """Called once, when it has ended or was lost, or could not be started."""


class Cluster(Protocol):
    """A system that hands out processes. Its methods may be called on any thread."""

    def places(self) -> Mapping[str, int]:
        """Return the hosts that there are now, with how many processes each may have in all.

        A place of a process that was told of (``Told``) goes after that process has ended for it.
        """

    def reach(self, host: str) -> Reached:
        """Get ready to start processes there. Raises BootstrapError."""

    def start(self, host: str, order: Order, payload: bytes, sink: Sink, told: Told) -> None:
        """Start one; return before it runs. ``payload``: see ``function.packed_call``."""

    def send(self, host: str, signum: int, numbers: Collection[int]) -> None:
        """Send a signal to these processes, which may have ended."""

    def stopped(self, host: str, numbers: Collection[int]) -> set[int]:
        """Return the numbers of those of these processes that are stopped (SIGSTOP)."""

    def close(self) -> None:
        """End whatever is left; return when ``sink`` has all that was written."""


class ClusterFleet(Fleet):
    """The hosts of a job in a cluster; see ``Fleet``."""

    def __init__(self, cluster: Cluster, sink: Sink) -> None:
        """``sink``: see Fleet."""
        super().__init__(None, sink)
        self._cluster = cluster
        self._placed: dict[str, _PlacedRanks] = {}

    def connect(self, hosts: Sequence[str], is_stopped: Callable[[], bool]) -> bool:
        """Implement ``Fleet.connect``."""
        new = [host for host in dict.fromkeys(hosts) if host not in self._placed]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for host, reached in zip(new, pool.map(self._cluster.reach, new), strict=True):
                self._placed[host] = _PlacedRanks(host, reached, self._cluster, self._sink)
        return not is_stopped()

    @property
    def is_spread(self) -> bool:
        """True: processes of other hosts must reach what listens here."""
        return True

    def is_far(self, host: str) -> bool:
        """Implement ``Fleet.is_far``."""
        return True

    def is_reached(self, host: str) -> bool:
        """Implement ``Fleet.is_reached``."""
        return host in self._placed

    def lost(self) -> set[str]:
        """Return none: which hosts there are the cluster says."""
        return set()

    def group(self, host: str) -> Group:
        """Implement ``Fleet.group``."""
        return self._placed[host]

    @property
    def groups(self) -> Sequence[Group]:
        """The groups, as ``Fleet.groups`` has them."""
        return list(self._placed.values())

    def torch_server(self, host: str, rendezvous: str) -> tuple[int, str]:
        """Implement ``Fleet.torch_server``."""
        reached = self._placed[host].reached
        return reached.torch_port, reached.address

    def close(self) -> None:
        """Implement ``Fleet.close``."""
        self._cluster.close()
        super().close()


class _PlacedRanks:
    """The processes of a job on one host (``Group``)."""

    def __init__(self, host: str, reached: Reached, cluster: Cluster, sink: Sink) -> None:
        self.reached = reached
        self._host = host
        self._cluster = cluster
        self._sink = sink
        self._exits = ExitQueue()

    @property
    def torch_port(self) -> int:
        """The port as ``HostRanks`` has it; the other methods are those of ``HostRanks``, too."""
        return self.reached.torch_port

    @property
    def running(self) -> frozenset[int]:
        return self._exits.running

    def start(self, orders: Sequence[Order], payload: bytes | None = None) -> None:
        self._exits.expect(order.rank for order in orders)
        told = Told(self._began, self._ended)
        for order in orders:
            self._cluster.start(self._host, order, payload or b"", self._sink, told)

    def _began(self, number: int, pid: int) -> None:
        self._exits.began({number: pid})

    def _ended(self, end: Ended) -> None:
        self._exits.add(replace(end, host=self._host))

    def pids(self) -> dict[int, int]:
        return self._exits.pids()

    def fds(self) -> list[int]:
        return [self._exits.fd]

    def stopped(self) -> set[int]:
        return self._cluster.stopped(self._host, self.running)

    def needs_polling(self) -> bool:
        return False

    def collect(self) -> list[Ended]:
        return self._exits.collect()

    def send(self, signum: int, ranks: Collection[int] | None = None) -> None:
        numbers = self.running if ranks is None else self.running.intersection(ranks)
        if numbers:
            self._cluster.send(self._host, signum, numbers)

    def close(self) -> None:
        self._exits.close()
