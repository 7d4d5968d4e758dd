"""Writes a changed script in the place of the old one, at once or not at all."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from kolovod.errors import CommandArgumentError

__all__ = ["is_in_git", "read", "replace"]

_GIT_TIMEOUT_S = 10.0


def read(path: Path) -> bytes:
    """Read the bytes of a script. Raises InvalidArgumentError if that is not possible."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandArgumentError(
            f"SCRIPT {str(path)!r} cannot be read: {error.strerror}"
        ) from None


def is_in_git(path: Path) -> bool:
    """Return whether git has this file as it is now."""
    command = ["git", "status", "--porcelain", "--ignored", "--", path.name]
    known = ["git", "ls-files", "--error-unmatch", "--", path.name]
    folder = path.resolve().parent
    try:
        for each in (known, command):
            done = subprocess.run(
                each, cwd=folder, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False
            )
            if done.returncode != 0 or (each is command and done.stdout):
                return False
    except (OSError, subprocess.TimeoutExpired):
        return False
    return True


def replace(path: Path, old: bytes, new: bytes, *, keep_old: bool) -> Path | None:
    """Write ``new`` where ``old`` is, with the mode and owner that the file has.

    A link stays one. ``keep_old``: keep a copy beside it, whose path is returned. Raises
    InvalidArgumentError if the file has changed since it was read, or cannot be written.
    """
    target = path.resolve()  # what a link points to
    if read(target) != old:
        raise CommandArgumentError(f"{path} has changed meanwhile: nothing is written")
    try:
        backup = _copy_beside(target, old) if keep_old else None
        _write(target, new)
    except OSError as error:
        raise CommandArgumentError(
            f"{path} cannot be written: {error.strerror}; it is as before"
        ) from None
    return backup


def _write(target: Path, content: bytes) -> None:
    status = target.stat()
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            with contextlib.suppress(PermissionError):  # of a file of somebody else
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fchmod(file.fileno(), status.st_mode & 0o7777)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _copy_beside(target: Path, content: bytes) -> Path:
    """Write a new file, with the next number if others are there; return its path."""
    number = 0
    while True:
        name = f"{target.name}.orig{f'.{number}' if number else ''}"
        try:
            with open(target.with_name(name), "xb") as file:
                file.write(content)
        except FileExistsError:
            number += 1
            continue
        os.chmod(target.with_name(name), target.stat().st_mode & 0o7777)
        return target.with_name(name)
