"""Runs a command in a host: ``door.py FOLDER COMMAND ...``, entered through ``nsenter --no-fork``.

This process is in all of the host's namespaces except that of process numbers, which only a child
enters. Signals that it gets go on to the command; it ends as the command ends, and the command ends
with it, also after SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys

FORWARDED = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}


_PR_SET_PDEATHSIG = 1


def _become(command: list[str], parent: int) -> None:
    # A session of its own: who signals this process's group must not reach the command twice.
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([parent], [], [], 0)[0]:  # its end is closed: it had ended before that
        os._exit(1)
    # Python ignores or handles these, and the one is inherited, the other comes too early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def main() -> None:
    """Run the command; never returns."""
    os.chdir(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError as error:  # without its first process, the host takes no others
        sys.exit(f"the host has ended ({error})")
    if child == 0:
        os.close(writing)
        _become(sys.argv[2:], reading)
    while True:
        number = signal.sigwait({*FORWARDED, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
