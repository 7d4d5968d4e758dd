"""Keys and configuration of the hosts' sshd, and of the ssh that reaches them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from netbed.namespaces import tool
from netbed.network import Address

__all__ = ["SSHD_PORT", "sshd_command", "write_files"]

SSHD_PORT = 22

_SERVER = """\
Port {port}
ListenAddress 0.0.0.0
ListenAddress ::
HostKey {key}
AuthorizedKeysFile {folder}/client.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
LogLevel VERBOSE
"""

_CLIENT = """\
IdentityFile {folder}/client
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking yes
"""


def _make_key(path: Path) -> str:
    """Return a new key pair; the public half, as a line of known_hosts has it."""
    command = [
        tool("ssh-keygen"),
        "-q",
        "-t",
        "ed25519",
        "-N",
        "",
        "-C",
        path.name,
        "-f",
        str(path),
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=30)
    kind, key, *_ = path.with_name(f"{path.name}.pub").read_text().split()
    return f"{kind} {key}"


def write_files(folder: Path, hosts: dict[str, Sequence[Address]]) -> None:
    """Write what hosts and clients need into ``folder``, for hosts by name."""
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    known = []
    _make_key(folder / "client")
    for name, interfaces in hosts.items():
        key = _make_key(folder / f"{name}.key")
        names = []
        for address in interfaces:
            lines += [f"{address.ipv4} {address.name}", f"{address.ipv6} {address.name}-v6"]
            names += [address.name, f"{address.name}-v6", address.ipv4, address.ipv6]
        known.append(f"{','.join(names)} {key}")
        text = _SERVER.format(port=SSHD_PORT, key=folder / f"{name}.key", folder=folder)
        (folder / f"{name}.sshd").write_text(text)
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "known_hosts").write_text("\n".join(known) + "\n")
    (folder / "ssh_config").write_text(_CLIENT.format(folder=folder))


def sshd_command(folder: Path, name: str) -> list[str]:
    """Return the command that runs a host's sshd, in the foreground."""
    return [
        tool("sshd"),
        "-D",
        "-f",
        str(folder / f"{name}.sshd"),
        "-E",
        str(folder / f"{name}.log"),
    ]
