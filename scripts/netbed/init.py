"""The first process of a host: ``init.py NAME FOLDER``, in the host's own namespaces.

It puts the bed's files in the place of the machine's, says that the host is up, and then reaps.
When it ends, the kernel ends every process of the host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def main() -> None:
    """Make the host; never returns."""
    name, folder = sys.argv[1:]
    socket.sethostname(name)
    _mount("--bind", f"{folder}/hosts", "/etc/hosts")
    _mount("--bind", f"{folder}/ssh_config", "/etc/ssh/ssh_config")
    own_ssh = os.path.expanduser("~/.ssh")
    if os.path.isdir(own_ssh):  # the user's keys and settings are no concern of the bed
        _mount("-t", "tmpfs", "-o", "mode=700", "tmpfs", own_ssh)
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    os.mkdir("/run/sshd")  # where sshd separates its privileges
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    print("up", flush=True)
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


if __name__ == "__main__":
    main()
