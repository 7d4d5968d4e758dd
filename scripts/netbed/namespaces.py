"""Hosts as namespaces: made by ``unshare``, entered by ``nsenter``.

A host has namespaces of its own for network, mounts, host name, IPC and process numbers, none of
which has a name anywhere: they end with their last process, and that ends with this one, even if
this one is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BedUnavailable", "Namespaces", "Process", "missing", "tool"]

HERE = Path(__file__).resolve().parent
TOOLS = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "tc": "iproute2",
    "nft": "nftables",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
"""What the bed runs, and the Debian package that it is in."""
_UNSHARE = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
_START_TIMEOUT_S = 30.0
_LISTENING = "0A"  # in /proc/net/tcp


class BedUnavailable(RuntimeError):
    """The bed cannot be made on this machine; the text says why."""


def tool(name: str) -> str:
    """Return the path of a command, also where only root's search path has it. "": not there."""
    places = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    return shutil.which(name, path=places) or ""


def missing() -> str:
    """Return which of the means for a bed is not here; "" if all are."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"network namespaces need root, this is user {os.geteuid()}"
    missing = [name for name in TOOLS if not tool(name)]
    if missing:
        packages = " ".join(sorted({TOOLS[name] for name in missing}))
        return f"{', '.join(missing)} not found: apt-get install {packages}"
    tried = subprocess.run(
        [tool("unshare"), *_UNSHARE[1:], "true"], capture_output=True, text=True, timeout=30
    )
    if tried.returncode != 0:
        return f"namespaces are refused: {tried.stderr.strip() or tried.returncode}"
    return ""


@dataclass(frozen=True)
class Process:
    """A process of a host."""

    pid: int
    """As seen from outside, so that a test can signal it."""
    inner: int
    """As the host numbers it."""
    command: str


class Namespaces:
    """One set of namespaces, kept by a process. ``close`` ends every process in it.

    To be made by a thread that lives as long: the kernel ends the host with the thread.
    """

    def __init__(self, keeper: Sequence[str], *, only_network: bool = False) -> None:
        self._only_network = only_network
        unshare = ["unshare", "--net"] if only_network else [*_UNSHARE, "--kill-child=KILL"]
        command = [tool("setpriv"), "--pdeathsig", "KILL", tool("unshare"), *unshare[1:], *keeper]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        """A process in the namespaces (but not in that of process numbers)."""
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "up":
            _, said = self._process.communicate(timeout=_START_TIMEOUT_S)
            raise BedUnavailable(f"a host did not start: {said.strip()}")

    @property
    def is_up(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def enter(self, command: Sequence[str], cwd: str | None = None) -> list[str]:
        """Return the command that runs ``command`` in here, as far as signals and its end go."""
        place = f"/proc/{self.pid}/ns"
        entry = [tool("nsenter"), f"--net={place}/net"]
        if self._only_network:
            return [*entry, "--", *command]
        entry += [f"--{kind}={place}/{file}" for kind, file in _FILES.items()]
        door = [sys.executable, "-I", "-S", str(HERE / "door.py"), cwd or os.getcwd()]
        return [*entry, "--no-fork", "--", *door, *command]

    def run(self, *command: str, text: str = "") -> str:
        """Run a command in the network namespace only; return its standard output."""
        entered = [tool("nsenter"), f"--net=/proc/{self.pid}/ns/net", "--", *command]
        done = subprocess.run(entered, input=text, capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            said = done.stderr.strip()
            raise BedUnavailable(f"{' '.join(command)} failed: {said}\n{text}".strip())
        return done.stdout

    def processes(self) -> list[Process]:
        """Return the processes of the host, without its first and without zombies."""
        if not self.is_up:
            return []
        mine = os.readlink(f"/proc/{self.pid}/ns/pid_for_children")
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdecimal():
                continue
            with contextlib.suppress(OSError):  # it ended meanwhile
                if os.readlink(f"/proc/{entry}/ns/pid") != mine:
                    continue
                status = Path(f"/proc/{entry}/status").read_text()
                numbers = status.partition("NSpid:")[2].splitlines()[0].split()
                command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ")
                if numbers[-1] != "1" and "\nState:\tZ" not in status:
                    text = command.decode(errors="replace").strip()
                    found.append(Process(int(entry), int(numbers[-1]), text))
        return found

    def listening_ports(self) -> list[int]:
        """Return the TCP ports, IPv4 and IPv6, where somebody listens now, ascending."""
        ports = set()
        for table in ("tcp", "tcp6"):
            path = Path(f"/proc/{self.pid}/net/{table}")
            for line in path.read_text().splitlines()[1:] if path.exists() else []:
                _, local, _, state, *_ = line.split()
                if state == _LISTENING:
                    ports.add(int(local.rpartition(":")[2], 16))
        return sorted(ports)

    def close(self) -> None:
        """End everything at once. Idempotent."""
        self._process.kill()
        self._process.communicate()


_FILES: dict[str, Any] = {
    "mount": "mnt",
    "uts": "uts",
    "ipc": "ipc",
    "pid": "pid_for_children",
}
