"""Several hosts on one machine: see ``Bed``."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from netbed.namespaces import HERE, BedUnavailable, Namespaces, Process, missing
from netbed.network import Address, Switch, addresses
from netbed.ssh import SSHD_PORT, sshd_command, write_files

__all__ = ["Bed", "unavailable"]

_SSHD_TIMEOUT_S = 30.0


class Bed:
    """Hosts with names, addresses, sshd and a switch between them; a context manager.

    A host is a set of namespaces: it has its own interfaces, ports, host name, process numbers,
    abstract sockets, ``/run``, ``/etc/hosts`` and ssh client configuration; files, memory and cores
    are the machine's. Host ``a`` is reached from every other as ``a`` (IPv4) and ``a-v6`` (IPv6),
    in the further networks as ``a-1``, ``a-1-v6``; ``ssh a`` works from each, with host keys
    checked.

    Nothing of it exists outside its namespaces but a temporary folder, and all ends with this
    process, however that ends. Any number of beds can exist at once, with the same names.

    ``networks``: interfaces ``eth0``, ``eth1`` ... of every host. ``bits_per_s``: of every link,
    both ways; 0: no limit. ``delay_s``: one way on every link, so twice that between two hosts.
    ``with_sshd``: False saves some time where nobody needs it.

    Raises BedUnavailable, saying why, where it cannot be made.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        networks: int = 1,
        bits_per_s: float = 0,
        delay_s: float = 0.0,
        with_sshd: bool = True,
    ) -> None:
        self.names = tuple(names)
        self._networks = networks
        self._bits_per_s = bits_per_s
        self._delay_s = delay_s
        self._with_sshd = with_sshd
        self._hosts: dict[str, Namespaces] = {}
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Bed:
        reason = missing()
        if reason:
            raise BedUnavailable(reason)
        try:
            self._make()
        except BaseException:
            self._cleanup.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cleanup.close()

    def _make(self) -> None:
        self.folder = self._make_folder()
        """Temporary; every host sees it."""
        write_files(self.folder, {name: self.addresses(name) for name in self.names})
        init = [sys.executable, "-I", "-S", str(HERE / "init.py")]
        for name in self.names:
            host = Namespaces([*init, name, str(self.folder)])
            self._cleanup.callback(host.close)
            self._hosts[name] = host
        self._switch = Switch(list(self._hosts.values()), self._networks, self._delay_s)
        self._cleanup.callback(self._switch.close)
        if self._bits_per_s:
            for name in self.names:
                self.limit(name, self._bits_per_s)
        if self._with_sshd:
            self._start_sshd()

    def _make_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="netbed-"))
        # Removes the folder when its input ends, which happens however this process ends.
        janitor = subprocess.Popen(
            ["sh", "-c", 'read -r _; rm -rf "$1"', "sh", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._cleanup.callback(janitor.communicate)
        return folder

    def _start_sshd(self) -> None:
        for name in self.names:
            self._sshd[name] = self.popen(name, sshd_command(self.folder, name))
            self._cleanup.callback(self._sshd[name].wait)
            self._cleanup.callback(self._sshd[name].kill)
        deadline = time.monotonic() + _SSHD_TIMEOUT_S
        for name, sshd in self._sshd.items():
            log = self.folder / f"{name}.log"
            while not log.exists() or "Server listening on 0.0.0.0" not in log.read_text():
                if sshd.poll() is not None or time.monotonic() > deadline:
                    said = log.read_text() if log.exists() else ""
                    raise BedUnavailable(f"sshd does not start ({sshd.poll()}): {said.strip()}")
                time.sleep(0.01)

    def addresses(self, name: str) -> list[Address]:
        """Return the addresses of each interface of a host."""
        index = self.names.index(name)
        return [addresses(index, name, network) for network in range(self._networks)]

    def address(self, name: str, network: int = 0) -> str:
        """Return the IPv4 address of a host."""
        return self.addresses(name)[network].ipv4

    # What runs

    def command(self, host: str, command: Sequence[str], cwd: str | None = None) -> list[str]:
        """Return the command that runs ``command`` in a host; signals and its end are the same."""
        return self._hosts[host].enter(command, cwd)

    def popen(
        self, host: str, command: Sequence[str], *, cwd: str | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """``subprocess.Popen`` in a host.

        Signals reach the command (not its children), and it ends with the Popen. Its input is empty
        unless ``stdin`` is given.
        """
        options.setdefault("stdin", subprocess.DEVNULL)
        entered = self.command(host, command, cwd)
        return subprocess.Popen(entered, start_new_session=True, **options)

    def run(
        self,
        host: str,
        command: Sequence[str],
        *,
        timeout_s: float = 60.0,
        cwd: str | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess[str]:
        """``subprocess.run`` in a host: its output as text, TimeoutExpired after ``timeout_s``."""
        options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, **options}
        entered = self.command(host, command, cwd)
        return subprocess.run(entered, timeout=timeout_s, start_new_session=True, **options)

    def processes(self, host: str) -> list[Process]:
        """Return all that runs in a host, but its init, the sshd that listens, and zombies."""
        listening = "sshd: " + " ".join(sshd_command(self.folder, host))
        return [p for p in self._hosts[host].processes() if not p.command.startswith(listening)]

    def listening_ports(self, host: str) -> list[int]:
        """Return the TCP ports where processes of a host listen now, ascending, without sshd's."""
        return [port for port in self._hosts[host].listening_ports() if port != SSHD_PORT]

    def kill_sshd(self, host: str) -> None:
        """SIGKILL for the sshd that listens, and for its sessions' sshd."""
        space = self._hosts[host]
        while found := [p.pid for p in space.processes() if p.command.startswith("sshd")]:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def kill_host(self, host: str) -> None:
        """End all processes of a host at once, for good; the others receive nothing of that."""
        for network in range(self._networks):
            self.set_link(host, up=False, network=network)
        self._hosts[host].close()

    # What happens to links

    def set_link(self, host: str, *, up: bool, network: int = 0) -> None:
        """Pull a host's cable, or put it in again."""
        self._switch.set_link(self.names.index(host), network, "up" if up else "down")

    def limit(self, host: str, bits_per_s: float, network: int | None = None) -> None:
        """Limit a host's links (or one of them) in both directions; 0: no limit any more."""
        for each in range(self._networks) if network is None else [network]:
            self._switch.limit(self.names.index(host), each, bits_per_s)

    def lose(self, share: float) -> None:
        """Lose this share (0 to 1) of all packets between hosts, at random."""
        self._switch.lose(share)

    def partition(self, group: Iterable[str], other: Iterable[str]) -> None:
        """Let nothing pass between two groups of hosts, until ``heal``; carriers stay."""
        index = self.names.index
        self._switch.cut([index(name) for name in group], [index(name) for name in other])

    def heal(self) -> None:
        """End all partitions."""
        self._switch.heal()


@functools.cache
def unavailable(*, with_delay: bool = False) -> str:
    """Return why no bed (``with_delay``: whose links have delay) can be made here; "" if one can.

    It is tried, once: a container may allow one thing and refuse another.
    """
    try:
        with Bed(["a", "b"], delay_s=1e-3 if with_delay else 0.0) as bed:
            bed.partition(["a"], ["b"])
            bed.limit("a", 1e9)
    except (BedUnavailable, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""
