"""Where the engine writes each rank's last operations when the world fails, and how many stay.

The engine writes them itself (``csrc/engine/last_operations.cc``), since the main thread may be
anywhere then; ``docs/late-ranks.md`` shows how to read one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

from kolovod.errors import InvalidArgumentError

__all__ = ["KEPT_FILES", "default_folder", "file_prefix", "is_ours", "prune"]

KEPT_FILES = 48  # in the default folder; another folder is its user's


def default_folder() -> Path:
    """The folder that is used unless the user names one."""
    return Path(tempfile.gettempdir()) / f"kolovod-{os.geteuid()}"


def file_prefix(folder: str, secret: str, epoch: int, members: Sequence[int] = ()) -> str:
    """What the files of one world begin with, folder included; "" if there are to be none.

    ``folder`` is the knob ``last_operations_dir``, ``secret`` the job's, which names the job: the
    ranks of one job have the same prefix. ``members``: of a process set. Raises
    InvalidArgumentError if ``folder`` cannot be made.
    """
    if folder == "none":
        return ""
    path = Path(folder).absolute() if folder else default_folder()
    if folder:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgumentError(
                f"KOLOVOD_LAST_OPERATIONS_DIR={folder!r}: there is no such folder, and it cannot "
                f"be made ({error.strerror})"
            ) from None
    elif not is_ours(path):
        warnings.warn(
            f"{path} is not a folder of this user: the last operations will not be written when "
            "the world fails (KOLOVOD_LAST_OPERATIONS_DIR names another folder)",
            stacklevel=3,
        )
        return ""
    job = _digest(secret) if secret else f"alone{os.getpid()}"
    process_set = f"set{_digest(str(list(members)))}-" if members else ""
    return str(path / f"{job}-epoch{epoch}-{process_set}")


def prune() -> None:
    """Remove all but the newest files of the default folder."""
    with contextlib.suppress(OSError):
        files = [(file.stat().st_mtime, file) for file in default_folder().glob("*.jsonl")]
        for _, file in sorted(files, reverse=True)[KEPT_FILES:]:
            file.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def is_ours(path: Path) -> bool:
    """Whether nobody else can have put it there: anyone may write into its parent."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True  # the engine makes it when it is needed
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
