"""The launcher's way to the agent of a host: by ssh, or here by a socket.

An agent that *lasts* outlives who has started it; it is found again by its name, at a socket in a
folder for this user (``runtime_folder``).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kolovod.core import runtime_folder
from kolovod.errors import HostError
from kolovod.launch import agent_end
from kolovod.launch.background import start_in_background
from kolovod.launch.folder_locks import is_held
from kolovod.launch.local import signal_name
from kolovod.net.unix_sockets import OtherUserError, connect_to, peer_process
from kolovod.rendezvous.rank_environment import without_mpi_variables

__all__ = [
    "START_S",
    "Line",
    "LocalLine",
    "SshLine",
    "SshOptions",
    "forwarded",
    "open_socket",
    "ssh_command",
]

START_S = 600.0
"""For an agent to be there, once its host is reached: its files may be on a slow file server."""
_ANSWER_S = 10.0
"""For one that is there to answer."""
_END_S = 20.0
"""For an agent and its ranks to be killed, once ssh is there (``agent_end``)."""
_LOOKS, _LOOK_S = 5, 0.05
_FORGOTTEN = re.compile(
    r"BASH_FUNC_.*|OLDPWD|PWD|SHLVL|_|.*CUDA_VISIBLE_DEVICES|HOSTNAME|SSH_.*|XDG_.*"
    r"|_HOROVOD_SECRET_KEY|KOLOVOD_SECRET|KOLOVOD_JOB"
)


@dataclass(frozen=True)
class SshOptions:
    """The options by which other hosts are reached."""

    port: int | None = None
    identity: str | None = None
    """A file with a private key."""
    arguments: Sequence[str] = ()
    """Further arguments of ssh."""
    connect_timeout_s: float = 10.0
    python: str = ""
    """The Python of the agents, which has Kolovod; this one's path by default."""
    directory: str = ""
    """The directory in which the ranks run; this process's by default."""


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the launcher's environment that ranks on other hosts inherit.

    It is all except what is about this host: these are Horovod's rules. Variables that describe a
    login or belong to another job are left out besides.
    """
    own = without_mpi_variables(environ)
    return {name: value for name, value in own.items() if not _FORGOTTEN.fullmatch(name)}


def ssh_command(
    host: str, ssh: SshOptions, environ: Mapping[str, str], lasting: str = ""
) -> list[str]:
    """Return the command line that starts an agent on ``host``. Decides, does nothing.

    ``lasting``: the name of one that lasts, which is started only if it is not there. ssh asks for
    no password and checks the host's key as its configuration says (by default: an unknown one is
    refused). A directory or a Python that is not there is told by the shell.
    """
    wanted = ["reach", lasting] if lasting else []
    return _ssh(host, ssh, environ, wanted)


def _ssh(
    host: str, ssh: SshOptions, environ: Mapping[str, str], wanted: Sequence[str]
) -> list[str]:
    python = ssh.python or sys.executable
    path = environ.get("PYTHONPATH")
    variables = ["env", f"PYTHONPATH={path}"] if path else []
    agent = shlex.join([*variables, python, "-m", "kolovod.launch.agent", *wanted])
    # What it says first tells that the host was reached, so that a slow file server is waited for.
    inner = f"echo; cd {shlex.quote(ssh.directory or os.getcwd())} && exec {agent}"
    command = ["ssh", "-T", "-o", "BatchMode=yes"]
    command += ["-o", f"ConnectTimeout={max(1, round(ssh.connect_timeout_s))}"]
    command += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
    if ssh.port is not None:
        command += ["-p", str(ssh.port)]
    if ssh.identity is not None:
        command += ["-i", ssh.identity]
    return [*command, *ssh.arguments, "--", host, f"exec /bin/sh -c {shlex.quote(inner)}"]


class Line(Protocol):
    """A way to an agent, in both directions."""

    @property
    def has_prelude(self) -> bool:
        """True if something may come before the first frame (``agent_messages``)."""

    @property
    def is_here(self) -> bool:
        """True if the agent is on this host, so that its ranks are known to end with it."""

    @property
    def connect_timeout_s(self) -> float:
        """The time that the host has to answer, in seconds."""

    def open(self) -> None:
        """Go there. Raises OSError, BootstrapError."""

    @property
    def source(self) -> int:
        """The descriptor from which the agent's messages are read."""

    @property
    def sink(self) -> int:
        """The descriptor to which messages for the agent are written."""

    @property
    def errors(self) -> int:
        """The descriptor of what comes from the way itself; -1: nothing does."""

    def why_ended(self, said: bytes) -> str:
        """Return why a line has ended. ``said``: what came from ``errors``."""

    def wake(self, pid: int) -> None:
        """Have the agent ``pid`` (0: not known) continued if a signal has stopped it."""

    def end(self, pid: int, ranks: Sequence[int]) -> str:
        """Kill the agent and its ranks, by process ids; return "", or why that is not sure."""

    def close(self, patience_s: float) -> None:
        """Leave. ``patience_s``: how long to wait for it to end by itself."""

    def release(self) -> None:
        """Close what ``close`` leaves open for who reads it."""


class SshLine:
    """A way by the system's ssh, whose process this one ends."""

    has_prelude = True
    is_here = False

    def __init__(self, host: str, ssh: SshOptions, lasting: str = "") -> None:
        self._host, self._ssh, self._lasting = host, ssh, lasting
        self.connect_timeout_s = ssh.connect_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start ssh, which starts the agent."""
        self._process = subprocess.Popen(
            ssh_command(self._host, self._ssh, os.environ, self._lasting),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher, which tells the agents
        )

    @property
    def source(self) -> int:
        """The descriptor of ssh's standard output."""
        return self._fd("stdout")

    @property
    def sink(self) -> int:
        """The descriptor of ssh's standard input."""
        return self._fd("stdin")

    @property
    def errors(self) -> int:
        """The descriptor of ssh's standard error."""
        return self._fd("stderr")

    def _fd(self, name: str) -> int:
        pipe = getattr(self._process, name)
        fd: int = pipe.fileno()
        return fd

    def why_ended(self, said: bytes) -> str:
        """Return how ssh has ended, with its last words."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        os.set_blocking(self.errors, False)
        with contextlib.suppress(OSError):
            said = (said + os.read(self.errors, 4096))[-4096:]
        code = process.returncode
        how = "" if code is None else f" with exit code {code}"
        if code is not None and code < 0:
            how = f", killed by signal {-code} ({signal_name(-code)})"
        lines = said.decode(errors="replace").strip().splitlines()
        last = "".join(f": {line.strip()}" for line in lines[-3:])
        return f"ssh to {self._host} ended{how}{last}"

    def wake(self, pid: int) -> None:
        """Have another ssh continue the agent, in the background; see ``Line.wake``."""
        if pid:
            with contextlib.suppress(OSError):
                start_in_background(_ssh(self._host, self._ssh, os.environ, ["wake", str(pid)]))

    def end(self, pid: int, ranks: Sequence[int]) -> str:
        """Have another ssh kill the agent and its ranks; see ``Line.end``."""
        wanted = ["end", *map(str, (pid, *ranks))]
        command = _ssh(self._host, self._ssh, os.environ, wanted)
        limit_s = 2 * self.connect_timeout_s + _END_S
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
                start_new_session=True,
            )
        except subprocess.TimeoutExpired:
            return f"it does not answer within {limit_s:g} s"
        except OSError as error:
            return str(error)
        last = "".join(f": {line.strip()}" for line in done.stderr.strip().splitlines()[-3:])
        return f"exit code {done.returncode}{last}" if done.returncode else ""

    def close(self, patience_s: float) -> None:
        """Close ssh's standard input, and kill ssh if it has not ended in ``patience_s``."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()  # the agent ends, if it has not
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def release(self) -> None:
        """Close ssh's standard output and standard error."""
        for pipe in (self._process.stdout, self._process.stderr) if self._process else ():
            if pipe is not None:
                pipe.close()


class LocalLine:
    """A way to an agent on this host that lasts."""

    has_prelude = False
    is_here = True
    connect_timeout_s = START_S
    errors = -1

    def __init__(self, name: str, *, is_there: bool = False) -> None:
        """``is_there``: see ``open_socket``."""
        self._name, self._is_there = name, is_there
        self._socket: socket.socket | None = None

    def open(self) -> None:
        """Connect to the agent's socket."""
        self._socket = open_socket(self._name, is_there=self._is_there)

    @property
    def source(self) -> int:
        """The socket's descriptor; ``sink`` is the same one."""
        assert self._socket is not None
        return self._socket.fileno()

    sink = source

    def why_ended(self, said: bytes) -> str:
        """Return the reason: the agent has hung up."""
        return "the process that runs the ranks of this host has hung up"

    def wake(self, pid: int) -> None:
        """Continue the agent that is at the other end; see ``Line.wake``."""
        assert self._socket is not None
        agent_end.wake(peer_process(self._socket)[0])

    def end(self, pid: int, ranks: Sequence[int]) -> str:
        """Kill the agent and its ranks; see ``Line.end``."""
        return "" if agent_end.end(pid, ranks) else f"process {pid} cannot be killed"

    def close(self, patience_s: float) -> None:
        """Shut the connection down, without waiting for anything."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()


def open_socket(name: str, *, is_there: bool = False) -> socket.socket:
    """Connect to the agent of this name, which is started if nobody answers there.

    ``is_there``: it runs a job already, so it is waited for while it lives: another one would know
    nothing of the job. Somebody may just have removed its folder, which it makes anew. Raises
    BootstrapError if it does not come.
    """
    folder = runtime_folder.made("agents") / name
    is_there = is_there and not _has_ended(folder)
    deadline = time.monotonic() + (_ANSWER_S if is_there else START_S)
    started: subprocess.Popen[bytes] | None = None
    while True:
        try:
            return connect_to(folder / "socket")
        except OtherUserError as error:
            raise HostError(f"{folder}: {error}") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise HostError(f"no agent answers at {folder}: {error}") from error
        if is_there:
            time.sleep(0.01)
            continue
        if started is None:
            started = start_in_background(
                [sys.executable, "-m", "kolovod.launch.agent", "serve", name]
            )
        elif started.poll() is not None:
            raise HostError(
                f"the agent that was to run ranks ended with exit code {started.returncode}"
            )
        time.sleep(0.01)


def _has_ended(folder: Path) -> bool:
    """Return whether the agent of that folder was killed: it holds its folder while it lives."""
    for _ in range(_LOOKS):  # it may be making it anew
        if not folder.exists() or is_held(folder):
            return False
        time.sleep(_LOOK_S)
    return True
