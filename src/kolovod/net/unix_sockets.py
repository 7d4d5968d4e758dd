"""Unix sockets between processes of this user on this host. The kernel says who the other end is.

All are made, listened at and connected here, and whoever is at the other end is asked for before
anything is said or read: a socket's name can be taken, and a folder may have been somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from kolovod.net.sockets import set_deadline

__all__ = [
    "OtherUserError",
    "accept_own",
    "check_peer",
    "connect_by",
    "connect_to",
    "listen_abstract",
    "listen_at",
    "peer_process",
    "same_user",
]


class OtherUserError(PermissionError):
    """A process of another user listens there."""


def listen_abstract(name: str, backlog: int) -> socket.socket:
    """Listen at a name in the abstract namespace, of which nothing is left behind.

    Raises OSError if the name is taken, which it can be by anybody who knows it.
    """
    return _listening(f"\0{name}", backlog)


def listen_at(path: Path) -> socket.socket:
    """Listen there, in the place of whoever has done so before."""
    path.unlink(missing_ok=True)
    with _short(path.parent) as folder:
        return _listening(f"{folder}/{path.name}", 4)


def _listening(address: str, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_to(path: Path) -> socket.socket:
    """Connect to the process that listens there. Raises OSError if none does, OtherUserError."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short(path.parent) as folder:
            connection.connect(f"{folder}/{path.name}")
        check_peer(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_by(sock: socket.socket, address: object, deadline: float) -> None:
    """Connect ``sock``, of whatever family, by ``deadline`` (``time.monotonic()`` seconds).

    Raises OSError (a TimeoutError at the deadline) if nobody is there, OtherUserError.
    """
    while True:
        set_deadline(sock, deadline)
        try:
            sock.connect(address)  # type: ignore[arg-type]
            break
        except BlockingIOError:  # AF_UNIX says so, instead of waiting, while the backlog is full
            time.sleep(0.005)
    check_peer(sock)


def accept_own(listener: socket.socket) -> socket.socket | None:
    """Accept the next connection; None: it is of another user's process, and was closed unread."""
    connection, _ = listener.accept()
    if same_user(connection):
        return connection
    connection.close()
    return None


def check_peer(sock: socket.socket) -> None:
    """Raise OtherUserError if a Unix socket is connected to a process of another user."""
    if not same_user(sock):
        raise OtherUserError("what listens there is a process of another user")


def same_user(sock: socket.socket) -> bool:
    """Return whether the other end is this user's, or root's; True if it is not a Unix socket.

    The ends of other sockets only prove who they are by the secret.
    """
    if sock.family != socket.AF_UNIX:
        return True
    _, uid = peer_process(sock)
    return uid in (0, os.geteuid())


def peer_process(sock: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the process at a Unix socket's other end (unix(7)).

    It is the one that has connected, or that has listened there.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return pid, uid


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Give a folder another name, since those of sockets have 107 bytes at most."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
