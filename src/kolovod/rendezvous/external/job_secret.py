"""The secret of a job that no launcher of ours has started: from its user."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Mapping

from kolovod.config import parse_bool
from kolovod.errors import BootstrapError, SettingError

__all__ = ["is_insecure", "job_secret", "read_secret"]

_MAX_BYTES = 4096
_MIN_BYTES = 16  # a random text that is shorter can be guessed


def job_secret(environ: Mapping[str, str], job: str) -> str:
    """Return the secret of ``job``, derived from its user's; "" if there is none.

    Derived, so that a rank which finds another job of the same user where it looks for its own is
    refused there. ``job``: what only its ranks have in common. With KOLOVOD_INSECURE it is one that
    everybody can guess. Raises what ``read_secret`` raises.
    """
    secret = read_secret(environ) or ("insecure" if is_insecure(environ) else "")
    return hmac.digest(secret.encode(), job.encode(), "sha256").hex() if secret else ""


def is_insecure(environ: Mapping[str, str]) -> bool:
    """Return whether the user says that nobody else reaches the hosts' ports."""
    text = environ.get("KOLOVOD_INSECURE", "").strip()
    return bool(text) and parse_bool(text, "KOLOVOD_INSECURE")


def read_secret(environ: Mapping[str, str]) -> str:
    """Return KOLOVOD_SECRET, or what the file KOLOVOD_SECRET_FILE holds; "" if neither is set.

    The file belongs to this user and nobody else can read it; or it belongs to the superuser, and
    nobody but its group can, as where a secret is mounted. Raises BootstrapError for another one,
    InvalidArgumentError if it is empty, or if the secret is too short to be a random one.
    """
    secret = environ.get("KOLOVOD_SECRET", "").strip()
    path = environ.get("KOLOVOD_SECRET_FILE", "")
    if secret:
        _check_length(secret, "KOLOVOD_SECRET has")
    if secret or not path:
        return secret
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise BootstrapError(
            f"KOLOVOD_SECRET_FILE={path!r} cannot be read: {error.strerror}"
        ) from None
    try:
        status = os.fstat(fd)  # of what is open: a path could come to mean another file
        _check(path, status)
        text = os.read(fd, _MAX_BYTES + 1)
    finally:
        os.close(fd)
    secret = text.decode(errors="replace").strip()
    if not secret or len(text) > _MAX_BYTES:
        raise SettingError(
            f"KOLOVOD_SECRET_FILE={path!r} holds {status.st_size} bytes: expected a random text "
            f"of at most {_MAX_BYTES}"
        )
    _check_length(secret, f"KOLOVOD_SECRET_FILE={path!r} holds")
    return secret


def _check_length(secret: str, where: str) -> None:
    """Raise if ``secret`` is so short that whoever hears a proof of it can try all there are."""
    count = len(secret.encode())
    if count < _MIN_BYTES:
        raise SettingError(
            f"{where} {count} bytes, which can be guessed: at least {_MIN_BYTES} random ones are "
            "needed, as export KOLOVOD_SECRET=$(openssl rand -hex 32) makes them"
        )


def _check(path: str, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    is_ours = status.st_uid == os.geteuid() and not mode & 0o077
    is_mounted = status.st_uid == 0 and not mode & 0o037
    if not stat.S_ISREG(status.st_mode) or not (is_ours or is_mounted):
        raise BootstrapError(
            f"KOLOVOD_SECRET_FILE={path!r} has mode {mode:o} and belongs to user {status.st_uid}: "
            f"others could read it. chmod 600 it, as user {os.geteuid()}"
        )
