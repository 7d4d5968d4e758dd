"""Two hosts on one machine, and Slurm on them: for scripts/launchers_check.py.

A host is a network namespace with an address, a host name and a process namespace of its own, so
that ranks of different hosts share neither loopback interface, nor sockets, nor memory. Needs the
superuser. Everything is in a temporary folder; the system's own configuration is not touched, and
what was started ends with ``close``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = "kv-start"
NAMES = ("n1", "n2")
ADDRESSES = {"n1": "10.214.0.1", "n2": "10.214.0.2"}

# enter HOST COMMAND...: run it there. What has been started ends with it.
ENTER = """#!/bin/sh
host=$1; shift
exec nsenter --net=/run/netns/{prefix}-$host \\
    unshare --uts --mount --pid --fork --kill-child --mount-proc \\
    sh -c 'hostname "$0"; mount --bind {folder}/hosts /etc/hosts; exec "$@"' "$host" "$@"
"""

# agent HOST COMMAND...: as ssh, for the launchers of MPI libraries. These give the command as words
# that a shell joins.
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec {folder}/enter "$host" sh -c "$*"
"""

# ssh OPTIONS -- HOST COMMAND: the same for kolovod run, which calls it by the name of the system's.
SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
host=$2; shift 2
exec {folder}/enter "$host" sh -c "$*"
"""

SLURM_CONF = """
ClusterName=kolovod
SlurmctldHost=n1
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/linear
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
KillWait=5
NodeName=n1 NodeAddr={n1} CPUs=4
NodeName=n2 NodeAddr={n2} CPUs=4
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=10 State=UP
"""


def run(*command: str, **options: Any) -> str:
    """Run a command to its end; return its output, or raise SystemExit with it."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, timeout=60, **options
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr or done.stdout}")
    return done.stdout


class TwoHosts:
    """The hosts n1 and n2, linked to each other. A context manager."""

    def __init__(self, folder: Path) -> None:
        """``folder``: empty; every user may enter it."""
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> TwoHosts:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{ADDRESSES[name]} {name}" for name in NAMES)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "bin").mkdir()
        for name, text in (("enter", ENTER), ("agent", AGENT), ("bin/ssh", SSH)):
            (self.folder / name).write_text(text.format(prefix=PREFIX, folder=self.folder))
            (self.folder / name).chmod(0o755)
        for name in NAMES:
            run("ip", "netns", "add", f"{PREFIX}-{name}")
        ends = [part for name in NAMES for part in ("name", "eth0", "netns", f"{PREFIX}-{name}")]
        run("ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for name in NAMES:
            here = ("ip", "-n", f"{PREFIX}-{name}")
            run(*here, "addr", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run(*here, "link", "set", device, "up")

    def start_slurm(self) -> dict[str, str]:
        """Start Slurm; return the variables by which its commands, on n1, find it."""
        folder = self.folder
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        conf = folder / "slurm.conf"
        conf.write_text(SLURM_CONF.format(folder=folder, **ADDRESSES))
        files = ("socket", "key-file", "log-file", "pid-file", "seed-file")
        options = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in files]
        self._start("munged", "--foreground", "--force", *options)
        _wait_for("munged", (folder / "munge.socket").exists)
        self._start(f"{folder}/enter", "n1", "slurmctld", "-D", "-f", str(conf))
        for name in NAMES:
            self._start(f"{folder}/enter", name, "slurmd", "-D", "-f", str(conf), "-N", name)
        environ = {**os.environ, "SLURM_CONF": str(conf)}

        def is_up() -> bool:
            command = [f"{folder}/enter", "n1", "sinfo", "-h", "-o", "%D %t"]
            done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
            return done.stdout.split() == ["2", "idle"]

        _wait_for("Slurm", is_up)
        return {"SLURM_CONF": str(conf)}

    def _start(self, *command: str) -> None:
        with open(self.folder / "daemons.log", "ab") as log:
            self._daemons.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def close(self) -> None:
        """End the daemons, with everything they have started, and remove the hosts."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()
        for name in NAMES:
            subprocess.run(
                ["ip", "netns", "del", f"{PREFIX}-{name}"], capture_output=True, check=False
            )


def missing_for_slurm() -> str:
    """Return what is not installed of what Slurm needs here; "" if all is there."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun") if not shutil.which(name)]
    return ", ".join(missing)


def _wait_for(what: str, is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} has not come up in 30 s")
        time.sleep(0.2)
