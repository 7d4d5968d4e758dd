"""The folder of this user on this host: where processes find each other, and files are left.

It is one that nobody else can have made, may enter, or can put something into::

    $XDG_RUNTIME_DIR/kolovod   where that is a folder of ours that only we may write to, and lasts
    /tmp/kolovod-UID           else; other variables are not asked, nor how full /tmp is: a process
                               that comes later must find the same

systemd removes /run/user/UID with the user's last login, unless that user lingers. Jobs outlive
logins, so there it is the other one.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

from kolovod.errors import BootstrapError

__all__ = ["adopt", "existing", "is_ours", "made", "runtime_folder"]

_FIXED = Path("/tmp")
_LOGINS = Path("/run/user")
_LINGERING = Path("/var/lib/systemd/linger")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def runtime_folder() -> Path:
    """Return the path of the folder, which need not exist yet."""
    given = _given()
    return _fixed() if given is None else given


def existing() -> list[Path]:
    """Return the existing, safe folders in which this user's processes may be found.

    One that was started by cron, say, has not been given the login's. A folder that is no login's
    was chosen, and is the only one.
    """
    chosen, login = runtime_folder(), _LOGINS / str(os.geteuid()) / "kolovod"
    places = [login, _fixed()] if chosen in (login, _fixed()) else [chosen]
    return [path for path in places if is_ours(path, may_be_missing=False)]


def adopt(path: Path) -> None:
    """Use ``path``, which is another process's, from now on; so do those that this one starts.

    Raises BootstrapError if none would be given it.
    """
    os.environ.pop("XDG_RUNTIME_DIR", None)
    if path != _fixed():
        os.environ["XDG_RUNTIME_DIR"] = str(path.parent)
    if path != runtime_folder():
        raise _trouble(path, "it is another user's, or was moved")


def made(*names: str) -> Path:
    """The folder ``names`` in it, made with all above it where they are not there, and checked.

    Raises BootstrapError for what others could have put there, or could change.
    """
    path = runtime_folder()
    try:
        above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _trouble(path.parent, error.strerror or str(error)) from None
    try:
        if not _keeps_names(os.fstat(above)):
            raise _trouble(path.parent, "others may put there what they like")
        where = path.parent
        for name in (path.name, *names):
            where /= name
            above, before = _level(above, name, where), above
            os.close(before)
    finally:
        os.close(above)
    return where


def is_ours(path: Path, may_be_missing: bool = True) -> bool:
    """Return whether nobody else can have put the folder ``path`` there, or can write into it."""
    try:
        return _keeps_names(path.parent.stat()) and not _fault(path.lstat())
    except FileNotFoundError:
        return may_be_missing
    except OSError:
        return False


def _given() -> Path | None:
    text = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(text)
    if not path.is_absolute():
        return None
    with contextlib.suppress(OSError):
        status = path.lstat()
        if not _fault(status) and _keeps_names(path.parent.stat()) and _lasts(path):
            return path / "kolovod"
    return None


def _lasts(path: Path) -> bool:
    if path.parent != _LOGINS:
        return True
    try:
        return (_LINGERING / pwd.getpwuid(os.geteuid()).pw_name).exists()
    except KeyError:
        return False


def _fixed() -> Path:
    return _FIXED / f"kolovod-{os.geteuid()}"


def _keeps_names(status: os.stat_result) -> bool:
    """Return whether only we and the system can move or remove what is ours in a folder.

    Its owner can, whatever its mode. The system is whoever owns ``/``: in a user namespace that may
    be another number than 0.
    """
    if status.st_uid not in (os.geteuid(), os.stat("/").st_uid):
        return False
    return bool(status.st_mode & stat.S_ISVTX) or not status.st_mode & _OTHERS_WRITE


def _fault(status: os.stat_result) -> str:
    """Return what is wrong with a folder, by its ``lstat``; "" if nothing is."""
    if not stat.S_ISDIR(status.st_mode):
        return "it is no folder"
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _level(above: int, name: str, where: Path) -> int:
    """The folder ``name`` in ``above``; the caller closes the descriptor."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, dir_fd=above)
    except OSError as error:  # also of a symbolic link
        raise _trouble(where, error.strerror or str(error)) from None
    status = os.fstat(fd)
    fault = _fault(status)
    if not fault and stat.S_IMODE(status.st_mode) != 0o700:
        try:
            os.fchmod(fd, 0o700)  # an earlier version let others look
        except OSError as error:
            fault = error.strerror or str(error)
    if fault:
        os.close(fd)
        raise _trouble(where, fault)
    return fd


def _trouble(path: Path, fault: str) -> BootstrapError:
    return BootstrapError(
        f"{path} cannot be the folder of this user's jobs: {fault}. Have it removed, or set "
        "XDG_RUNTIME_DIR to a folder of yours that only you may write to (mode 0700)"
    )
