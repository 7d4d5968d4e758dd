"""A watcher that kills what is left of a job when its launcher dies.

It runs as a script, too, and imports nothing of Kolovod.

``exec``: becomes the rank's command, after asking the kernel to kill it when the launcher dies.
``watch``: a process beside the launcher that waits for its end, however that comes, and then kills
what is left of the job: also grandchildren, which the kernel's signal does not reach. Closing the
watcher's standard input ends it in the same way.

A process belongs to a job if it is in the session of one of its ranks, or if the job's mark is in
its environment: children that made a session of their own are found by that. A job that was started
inside another carries the marks of both, separated by commas.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable

__all__ = [
    "MARK_NAME",
    "exec_command",
    "is_stopped",
    "job_processes",
    "kill_job",
    "sessions_below",
    "watch_command",
]

MARK_NAME = "KOLOVOD_JOB"
_PR_SET_PDEATHSIG = 1
_PF_KTHREAD = 0x00200000  # linux/sched.h: a thread of the kernel, which has no environment
_EXEC_S = 1.0
"""For one look at all processes to wait for those that are in execve(2)."""
_EXEC_LOOK_S = 0.001
_EXIT_CANNOT_EXECUTE = 126
_EXIT_NOT_FOUND = 127


def exec_command(command: list[str]) -> list[str]:
    """Return the command line that becomes ``command`` and dies with this process."""
    return [*_python(), "exec", str(os.getpid()), *command]


def watch_command(mark: str) -> list[str]:
    """Return the command line of a watcher for the job with this mark."""
    return [*_python(), "watch", mark]


def _python() -> list[str]:
    # Isolated and without site: the user's Python variables are for the command, not for this.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__)]


def job_processes(mark: str, sessions: Iterable[int] = ()) -> set[int]:
    """Return living processes of the job, this one and zombies excepted.

    Without a mark those in ``sessions`` only.
    """
    wanted = set(sessions)
    own = os.getpid()
    there = {int(entry) for entry in os.listdir("/proc") if entry.isdecimal()} - {own}
    deadline = time.monotonic() + _EXEC_S
    return {pid for pid in there if _is_of_job(pid, mark, wanted, deadline)}


def _is_of_job(pid: int, mark: str, sessions: set[int], deadline: float) -> bool:
    """Return whether ``pid`` lives and has that mark, or is in one of ``sessions``."""
    try:
        state, _, _, session = _status(pid)
        if state in (b"Z", b"X"):
            return False
        if int(session) in sessions or not mark:
            return int(session) in sessions
        variables = _environment(pid, deadline)
    except (OSError, ValueError):
        return False  # it ended meanwhile, or belongs to another user
    name = f"{MARK_NAME}=".encode()
    marks = [v[len(name) :].split(b",") for v in variables if v.startswith(name)]
    return any(mark.encode() in listed for listed in marks)


def _environment(pid: int, deadline: float) -> list[bytes]:
    """Return the variables of a process, waiting until ``deadline`` for one in execve(2).

    For a moment such a process has neither its old ones nor its new ones. Linux says where the
    code of the new program begins after it has said where its variables are (load_elf_binary).
    """
    while not (content := _content(pid, "environ")):
        status = _status(pid, 49)
        flags, code, begin, end = (int(status[field]) for field in (6, 23, 47, 48))
        has_none = flags & _PF_KTHREAD or (code and begin == end)
        if has_none or time.monotonic() > deadline:
            break
        time.sleep(_EXEC_LOOK_S)
    return content.split(b"\0")


def _content(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped this process, which nobody has continued."""
    try:
        return _status(pid)[0] == b"T"
    except (OSError, ValueError):
        return False  # it ended meanwhile


def sessions_below(parent: int) -> set[int]:
    """Return the sessions that children of ``parent`` lead: those of its ranks, if it runs any."""
    found = set()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):  # it ended meanwhile
            _, above, _, session = _status(int(entry))
            if int(above) == parent and session.decode() == entry:
                found.add(int(entry))
    return found


def _status(pid: int, fields: int = 4) -> list[bytes]:
    """Return state, parent, group, session and so on of a process, as proc_pid_stat(5) has them."""
    # pid (name) state ...; the name may hold spaces and brackets
    return _content(pid, "stat").rpartition(b")")[2].split()[:fields]


def kill_job(
    mark: str, sessions: Iterable[int], signum: int, spare: frozenset[int] = frozenset()
) -> int:
    """Send ``signum`` to every process of the job except ``spare``; return how many it has."""
    wanted = set(sessions)
    processes = job_processes(mark, wanted) - spare
    for pid in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            _signal(pid, mark, wanted, signum)
    return len(processes)


def _signal(pid: int, mark: str, sessions: set[int], signum: int) -> None:
    """Send a signal to a process of the job, not to another that has got its number meanwhile."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # an old kernel, a sandbox, or too many open files
        os.kill(pid, signum)
        return
    try:
        if _is_of_job(pid, mark, sessions, time.monotonic() + _EXEC_S):
            signal.pidfd_send_signal(pidfd, signum)
    finally:
        os.close(pidfd)


def _exec(parent: int, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the launcher died before the line above
        return 128 + signal.SIGKILL
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; the command must not
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        sys.stderr.write(f"kolovod: command not found: {command[0]}\n")
        return _EXIT_NOT_FOUND
    except OSError as error:
        sys.stderr.write(f"kolovod: cannot run {command[0]}: {error.strerror}\n")
        return _EXIT_CANNOT_EXECUTE


def _watch(mark: str) -> int:
    # Who signals all processes of a job means its ranks.
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    for signum in ignored:
        signal.signal(signum, signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    with contextlib.suppress(OSError):
        # Not by the end of standard input alone: a child forked by the launcher may hold that open.
        poll.register(os.pidfd_open(os.getppid()), select.POLLIN)
    poll.poll()
    # A process may fork while the list is read: repeat until nobody is left.
    deadline = time.monotonic() + 10
    while kill_job(mark, (), signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)
    return 0


def main(arguments: list[str]) -> int:
    """Run as ``exec PARENT COMMAND...`` or ``watch MARK``."""
    if arguments[0] == "exec":
        return _exec(int(arguments[1]), arguments[2:])
    return _watch(arguments[1])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
