"""The switch between the hosts, in a network namespace of its own, and what can happen to links."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from netbed.namespaces import HERE, BedUnavailable, Namespaces, tool

__all__ = ["Address", "Switch", "addresses"]

_BUILD = HERE.parent.parent / "build" / "netbed"
_QUEUE_MS = 50  # what a limited link holds back before it loses packets
_BURST_MS = 1  # what passes at once after a pause
_LEAST_BURST_BYTES = 16 << 10
_TABLE = "bridge netbed"
_LOSS_STEPS = 100_000


@dataclass(frozen=True)
class Address:
    """Of one interface of a host."""

    name: str
    """Of the host, as the hosts file has it."""
    ipv4: str
    ipv6: str


def addresses(host: int, name: str, network: int) -> Address:
    """Return the ``host``-th host's address in a network, whose number, if not 0, the name has."""
    suffix = f"-{network}" if network else ""
    return Address(f"{name}{suffix}", f"10.83.{network}.{host + 1}", f"fd83:{network}::{host + 1}")


def compile_delay() -> Path:
    """Compile delay.cc with the system's C++ compiler, unless it is up to date."""
    source, program = HERE / "delay.cc", _BUILD / "delay"
    if program.exists() and program.stat().st_mtime >= source.stat().st_mtime:
        return program
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        raise BedUnavailable("links with delay need a C++ compiler: install one, or name it in CXX")
    _BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILD) as folder:
        fresh = Path(folder) / "delay"
        command = [compiler, "-std=c++17", "-O2", str(source), "-o", str(fresh)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if built.returncode != 0:
            raise BedUnavailable(f"{' '.join(command)} failed:\n{built.stderr}")
        fresh.replace(program)  # whole or not at all, should two beds start together
    return program


class Switch:
    """One bridge per network, and one port of each for every host."""

    def __init__(self, hosts: Sequence[Namespaces], networks: int, delay_s: float) -> None:
        self._hosts = hosts
        self._networks = networks
        self._relay: subprocess.Popen[str] | None = None
        self._limited: set[tuple[int, int]] = set()
        self._loss = 0.0
        self._cut: list[tuple[list[int], list[int]]] = []
        self._space = Namespaces(["sh", "-c", "echo up; exec sleep infinity"], only_network=True)
        try:
            self._make(delay_s)
        except BaseException:
            self.close()
            raise

    def _port(self, host: int, network: int) -> str:
        return f"p{host}n{network}"

    def _make(self, delay_s: float) -> None:
        pairs = [(h, n) for h in range(len(self._hosts)) for n in range(self._networks)]
        lines = []
        for network in range(self._networks):
            lines += [
                f"link add br{network} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
                f"link set br{network} up",
            ]
        if delay_s:
            self._start_relay(delay_s, pairs)
        for index, network in pairs:
            port, pid = self._port(index, network), self._hosts[index].pid
            if delay_s:
                lines.append(f"link set d{port} name eth{network} netns {pid}")
            else:
                lines.append(f"link add {port} type veth peer name eth{network} netns {pid}")
            lines.append(f"link set {port} master br{network} up")
        self._space.run(tool("ip"), "-batch", "-", text="\n".join(lines))
        for index, host in enumerate(self._hosts):
            host.run(tool("ip"), "-batch", "-", text="\n".join(self._of_host(index)))
        self._space.run(
            tool("nft"),
            f"add table {_TABLE}; add chain {_TABLE} forward "
            "{ type filter hook forward priority 0; }",
        )

    def _of_host(self, host: int) -> list[str]:
        lines = ["link set lo up"]
        for network in range(self._networks):
            address = addresses(host, "", network)
            lines.append(f"link set eth{network} up")
            lines.append(f"addr add {address.ipv4}/24 dev eth{network}")
            if Path("/proc/sys/net/ipv6").exists():
                lines.append(f"addr add {address.ipv6}/64 dev eth{network} nodad")
        return lines

    def _start_relay(self, delay_s: float, pairs: Sequence[tuple[int, int]]) -> None:
        if not os.path.exists("/dev/net/tun"):
            raise BedUnavailable("links with delay need /dev/net/tun")
        names = [name for h, n in pairs for name in (f"d{self._port(h, n)}", self._port(h, n))]
        command = [str(compile_delay()), str(round(delay_s * 1e9)), *names]
        self._relay = subprocess.Popen(
            self._space.enter([tool("setpriv"), "--pdeathsig", "KILL", *command]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.setpriority(os.PRIO_PROCESS, self._relay.pid, -10)  # late packets are a longer delay
        assert self._relay.stdout is not None
        if self._relay.stdout.readline().strip() != "up":
            _, said = self._relay.communicate()
            raise BedUnavailable(f"the relay for delay did not start: {said.strip()}")

    def limit(self, host: int, network: int, bits_per_s: float) -> None:
        """Limit a host's link in both directions; 0: no limit."""
        for space, device in (
            (self._hosts[host], f"eth{network}"),
            (self._space, self._port(host, network)),
        ):
            if not bits_per_s:
                if (host, network) in self._limited:
                    space.run(tool("tc"), "qdisc", "del", "dev", device, "root")
                continue
            burst = max(_LEAST_BURST_BYTES, int(bits_per_s / 8 * _BURST_MS / 1e3))
            bucket = f"rate {int(bits_per_s)}bit burst {burst} latency {_QUEUE_MS}ms"
            command = f"qdisc replace dev {device} root tbf {bucket}"
            space.run(tool("tc"), *command.split())
        (self._limited.add if bits_per_s else self._limited.discard)((host, network))

    def set_link(self, host: int, network: int, state: str) -> None:
        """Set a link ``up`` or ``down`` at the switch: the host sees whether there is a carrier."""
        self._space.run(tool("ip"), "link", "set", self._port(host, network), state)

    def lose(self, share: float) -> None:
        """Lose this share of all packets between hosts from now on."""
        self._loss = share
        # Else what is lost, or not, are up to 64 KiB that the kernel has not cut yet.
        segments = "1" if share else "65535"
        for host in filter(lambda host: host.is_up, self._hosts):
            for network in range(self._networks):
                device = f"eth{network}"
                host.run(tool("ip"), "link", "set", device, "gso_max_segs", segments)
        self._filter()

    def cut(self, group: Sequence[int], other: Sequence[int]) -> None:
        """Pass nothing between two groups of hosts, in all networks."""
        self._cut.append((list(group), list(other)))
        self._filter()

    def heal(self) -> None:
        """End all cuts."""
        self._cut.clear()
        self._filter()

    def _filter(self) -> None:
        def ports(group: Sequence[int]) -> str:
            names = [self._port(h, n) for h in group for n in range(self._networks)]
            return "{ " + ", ".join(f'"{name}"' for name in names) + " }"

        lines = [f"flush chain {_TABLE} forward"]
        for group, other in self._cut:
            for one, two in ((group, other), (other, group)):
                lines.append(
                    f"add rule {_TABLE} forward iifname {ports(one)} oifname {ports(two)} drop"
                )
        if self._loss:
            below = round(self._loss * _LOSS_STEPS)
            lines.append(
                f"add rule {_TABLE} forward numgen random mod {_LOSS_STEPS} < {below} drop"
            )
        self._space.run(tool("nft"), "-f", "-", text="\n".join(lines) + "\n")

    def close(self) -> None:
        """Remove the switch. Idempotent."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        self._space.close()
