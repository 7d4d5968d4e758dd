"""The hosts of a job: this one, and others that ssh reaches, with what runs there."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from kolovod.config import load
from kolovod.errors import BootstrapError, CommandArgumentError, HostError
from kolovod.launch.agent_line import LocalLine, SshLine, SshOptions, forwarded
from kolovod.launch.hosts import is_this_host
from kolovod.launch.local import Ended, HostRanks, Order
from kolovod.launch.remote import RemoteRanks
from kolovod.launch.saved_state import Persistence, SavedState
from kolovod.net.addresses import LOOPBACK, endpoint, own_addresses, split_addresses
from kolovod.rendezvous.external.launchers import asked_store
from kolovod.rendezvous.rank_environment import RankEnvironment

__all__ = ["Fleet", "Group", "Meeting", "Sink"]

_COPIES = 2
"""Hosts that know what the next launcher must, besides this one: to tell all of a large job would
take too long each time."""

Sink = Callable[[int, str, bytes], None]
"""Called with what a process writes: its number, "stdout" or "stderr", bytes."""


class Group(Protocol):
    """Processes that are started, watched and ended together (see ``HostRanks``)."""

    @property
    def torch_port(self) -> int:
        """A port for a server that a rank may start; see HostRanks, as for the other methods."""

    @property
    def running(self) -> frozenset[int]: ...

    def start(self, orders: Sequence[Order], payload: bytes | None = None) -> None: ...

    def pids(self) -> dict[int, int]: ...

    def fds(self) -> list[int]: ...

    def stopped(self) -> set[int]: ...

    def needs_polling(self) -> bool: ...

    def collect(self) -> list[Ended]: ...

    def send(self, signum: int, ranks: Collection[int] | None = None) -> None: ...

    def close(self) -> None: ...


class Meeting:
    """The addresses at which a server of the launcher's listens, and at which each host finds it.

    Behind NAT, or a firewall, users say where other hosts find it.
    """

    def __init__(
        self, fleet: Fleet, variables: Mapping[str, str], *, more_may_come: bool = False
    ) -> None:
        """``variables``: of the ranks, over the launcher's own. Raises InvalidArgumentError.

        ``more_may_come``: other hosts may join later though there are none yet.
        """
        self.host, self.port = "", 0
        self.addresses: list[str] = []
        """To listen at; none: the loopback interface is enough."""
        if not fleet.is_spread and not more_may_come:
            return
        self.host, self.port = asked_store(os.environ)
        if self.host and not self.port:
            raise CommandArgumentError(
                f"KOLOVOD_STORE_HOST={self.host}, where other hosts reach this one, needs "
                "KOLOVOD_STORE_PORT, a port that is open there; or unset it"
            )
        wanted = load({**os.environ, **variables}).interface_names
        # Where ssh came in, the way back is known to be open: those addresses first.
        seen = [remote.addresses[0] for remote in fleet.remote.values()]
        own = own_addresses(wanted)
        first = [address for address in own if address in seen and not wanted]
        self.addresses = list(dict.fromkeys([*first, *own]))

    def seen_from(self, address: str, *, is_remote: bool) -> str:
        """Return ``address``, of what listens, as ranks of this host or of another one find it."""
        return endpoint(self.host, self.port) if self.host and is_remote else address


class Fleet:
    """Starts processes on hosts, and hears of their ends. ``close`` leaves nothing behind."""

    def __init__(
        self,
        ssh: SshOptions | None,
        sink: Sink,
        popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
        persistence: Persistence | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``ssh``: how other hosts are reached; None: hosts are but labels, all is here.

        ``sink``, ``popen``: see HostRanks; the sink hears of ranks that a host has no right to.
        ``persistence``: agents run the ranks, here too, and outlive this process. ``report``: is
        called with what users should know of hosts, on any thread.
        """
        self.here: HostRanks | RemoteRanks | None = None
        self.remote: dict[str, RemoteRanks] = {}
        self._ssh = ssh
        self._sink = sink
        self._popen = popen
        self._persistence = persistence
        self._replaced: list[RemoteRanks] = []  # lost ones
        self._names_here: set[str] = set()
        self._missed: set[str] = set()
        self._report = report
        self.may_run_on = False
        """After ``close``: whether nobody could find out if all processes have ended."""
        self._sent: dict[tuple[int, int], str] = {}  # why, by process and signal

    def connect(self, hosts: Sequence[str], is_stopped: Callable[[], bool]) -> bool:
        """Reach all ``hosts`` that were not reached before, or were lost since, at once.

        Returns False if ``is_stopped()`` meanwhile. Raises BootstrapError if some cannot be
        reached, each with its reason.
        """
        wanted = list(dict.fromkeys(hosts))
        far = [host for host in wanted if self.is_far(host)]
        made = {host: self._far(host) for host in far if self._is_to_reach(self.remote.get(host))}
        self._names_here |= set(wanted).difference(far)
        if len(far) < len(wanted) and self._is_to_reach(self.here):
            if self._persistence is not None:
                self.reach_here()
            else:
                self.here = HostRanks(self._sink, self._popen)
        results: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

        def reach(remote: RemoteRanks) -> None:
            try:
                remote.connect()
                results.put((remote.host, ""))
            except (BootstrapError, OSError) as error:
                results.put((remote.host, str(error)))

        for remote in made.values():
            threading.Thread(target=reach, args=(remote,), daemon=True).start()
        reasons: dict[str, str] = {}
        while len(reasons) < len(made):
            if is_stopped():
                self._replace(made)  # to be closed
                return False
            with contextlib.suppress(queue.Empty):
                host, reason = results.get(timeout=0.1)
                reasons[host] = reason
        failed = [(host, reasons[host]) for host in made if reasons[host]]
        for host, _ in failed:
            made.pop(host).close()
        self._replace(made)
        if failed:
            lines = "".join(f"\n  {host}: {reason}" for host, reason in failed)
            count = len(failed) + len(made)
            raise HostError(
                f"{len(failed)} of {count} other hosts cannot be used, so nothing was "
                f"started:{lines}\n'ssh -o BatchMode=yes HOST true' must work from here without a "
                "question; --remote-python and --directory say where things are there"
            )
        return True

    @staticmethod
    def _is_to_reach(group: HostRanks | RemoteRanks | None) -> bool:
        return group is None or (isinstance(group, RemoteRanks) and bool(group.lost))

    def _far(self, host: str) -> RemoteRanks:
        # Hosts may have one file system, and so one folder.
        name = "" if self._persistence is None else f"{self._persistence.name}-{host}"
        line = SshLine(host, self._ssh or SshOptions(), name)
        return RemoteRanks(host, line, self._sink, self._persistence, self._report)

    def reach_here(self, *, anew: bool = False) -> RemoteRanks:
        """Return the agent of this host, which lasts. Raises BootstrapError.

        ``anew``: one is started where that of an earlier launcher does not answer.
        """
        if isinstance(self.here, RemoteRanks) and not self.here.lost:
            return self.here
        assert self._persistence is not None
        is_first = not isinstance(self.here, RemoteRanks)
        is_there = is_first and self._persistence.goes_on and not anew
        line = LocalLine(self._persistence.name, is_there=is_there)
        made = RemoteRanks("this host", line, self._sink, self._persistence, self._report)
        try:
            made.connect()  # before others, on other threads, can find it
        except BaseException:
            made.close()
            raise
        if isinstance(self.here, RemoteRanks):
            self._replaced.append(self.here)
            self.here.replaced()
        self.here = made
        return made

    def keep(self, kept: SavedState) -> None:
        """Have the agent of this host keep it for the next launcher, and some others a copy."""
        if isinstance(self.here, RemoteRanks):
            self.here.keep(kept.as_json())
        reached = [self.remote[host] for host in sorted(self.remote) if not self.remote[host].lost]
        for remote in reached[:_COPIES] if self._persistence is not None else ():
            remote.keep(kept.copy_as_json())

    def _replace(self, made: Mapping[str, RemoteRanks]) -> None:
        before = [self.remote[host] for host in made if host in self.remote]
        for group in before:
            group.replaced()
        self._replaced += before
        self.remote |= made

    def miss(self, hosts: Iterable[str]) -> None:
        """An earlier launcher has reached these hosts, and this one has not, if it has not."""
        self._missed |= set(hosts)

    @property
    def far_hosts(self) -> set[str]:
        """The hosts that this launcher or an earlier one has reached by ssh."""
        return self._missed | self.remote.keys()

    def lost(self) -> set[str]:
        """Return hosts that cannot be reached any more; of this one, whose agent has ended."""
        far = {host for host, group in list(self.remote.items()) if group.lost}
        far |= self._missed - self.remote.keys()
        is_here = isinstance(self.here, RemoteRanks) and bool(self.here.lost)
        return far | self._names_here if is_here else far

    @property
    def is_spread(self) -> bool:
        """True if processes of other hosts must reach what listens here."""
        return bool(self.remote)

    def is_far(self, host: str) -> bool:
        """Return whether ssh is needed to get there."""
        return self._ssh is not None and not is_this_host(host)

    def is_reached(self, host: str) -> bool:
        """Return whether processes can be started there."""
        return not self.is_far(host) or host in self.remote

    def group(self, host: str) -> Group:
        """Return the processes of a host that was reached."""
        group: Group | None = self.remote.get(host, self.here)
        if group is None:
            raise AssertionError("the job was not started")
        return group

    @property
    def groups(self) -> Sequence[Group]:
        """The groups of all hosts."""
        here: list[Group] = [] if self.here is None else [self.here]
        return [*here, *self.remote.values(), *self._replaced]

    def pids_here(self) -> list[int]:
        """Return the ids of the processes that were started on this host."""
        return [] if self.here is None else list(self.here.pids().values())

    @property
    def running(self) -> set[int]:
        """The processes that were not seen to end."""
        return {rank for group in self.groups for rank in group.running}

    def fds(self) -> list[int]:
        """Return descriptors that are readable when ``collect`` has something to tell."""
        return [fd for group in self.groups for fd in group.fds()]

    def needs_polling(self) -> bool:
        """Return whether ``collect`` must be called by and by."""
        return any(group.needs_polling() for group in self.groups)

    def collect(self) -> list[Ended]:
        """Return the ends since the last call; those that this launcher has caused say why."""
        return [self._with_cause(end) for group in self.groups for end in group.collect()]

    def _with_cause(self, end: Ended) -> Ended:
        signum = end.exit_code - 128  # so a shell around the command tells it, too
        why = self._sent.get((end.rank, signum), "")
        return replace(end, given_up=why) if why and not end.lost else end

    def stopped(self) -> set[int]:
        """Return the ranks whose process is stopped (SIGSTOP)."""
        return {rank for group in self.groups for rank in group.stopped()}

    def send(self, signum: int, why: str, ranks: Collection[int] | None = None) -> None:
        """Send a signal to these processes, and to what they have started. None: to all.

        ``why`` is told where it has ended one of them; "": it is the user's own.
        """
        for group in self.groups:
            reached = group.running if ranks is None else group.running & set(ranks)
            for rank in reached if why else ():
                self._sent.setdefault((rank, signum), why)
            if ranks is None:
                group.send(signum)
            elif reached:
                group.send(signum, reached)

    def order(
        self,
        number: int,
        command: Sequence[str],
        environment: RankEnvironment,
        variables: Mapping[str, str],
        torch: tuple[int, str],
        *,
        beside: int = 0,
    ) -> Order:
        """Return an order to start the process ``number`` on its environment's host.

        ``variables``: over the launcher's own. ``torch``: port and address of the server that
        ``torch.distributed`` starts in rank 0. ``beside``: see Order.
        """
        is_remote = environment.host in self.remote
        inherited = forwarded(os.environ) if is_remote else {}
        if inherited:
            inherited.setdefault("PYTHONUNBUFFERED", "1")
        told = environment.torch_variables(*torch)
        facts = environment.variables()
        everything = {**inherited, **variables, **told, **variables, **facts}
        return Order(number, command, everything, beside)

    def torch_server(self, host: str, rendezvous: str) -> tuple[int, str]:
        """Return port and address for a server that a process on ``host`` starts, for ``order``."""
        group = self.group(host)
        if isinstance(group, RemoteRanks) and group is not self.here:
            return group.torch_port, group.addresses[1] or group.host
        return group.torch_port, split_addresses(rendezvous)[0][0] if self.remote else LOOPBACK

    def leave_alone(self) -> None:
        """Leave agents that last, and what they run, as they are; ``close`` has nothing to end."""
        for group in self.groups:
            if isinstance(group, RemoteRanks):
                group.leave_alone()

    def close(self) -> None:
        """End whatever is left, and release everything. Idempotent."""
        for remote in self.remote.values():
            remote.begin_close()
        for group in self.groups:
            group.close()
            self.may_run_on |= isinstance(group, RemoteRanks) and group.may_run_on
