"""Files of the last operations of failed worlds: where the engine writes them, how many stay.

The engine writes them itself (``csrc/engine/last_operations.cc``), since the main thread may be
anywhere then; ``docs/late-ranks.md`` shows how to read one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from kolovod.core.runtime_folder import is_ours, runtime_folder
from kolovod.errors import InvalidArgumentError

__all__ = ["KEPT_FILES", "file_prefix", "prune"]

KEPT_FILES = 48  # in the default folder; another folder is its user's


def file_prefix(folder: str, secret: str, epoch: int, members: Sequence[int] = ()) -> str:
    """Return the beginning of one world's file names, folder included; "" for no files.

    ``folder`` is the knob ``last_operations_dir``, ``secret`` the job's, which names the job: the
    ranks of one job have the same prefix. ``members``: a process set's. Raises InvalidArgumentError
    if ``folder`` cannot be made.
    """
    if folder == "none":
        return ""
    path = Path(folder).absolute() if folder else runtime_folder()
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
            f"{path} is not a folder that only this user may write to: the last operations will "
            "not be written when the world fails (KOLOVOD_LAST_OPERATIONS_DIR names another one)",
            stacklevel=3,
        )
        return ""
    job = _digest(secret) if secret else f"alone{os.getpid()}"
    process_set = f"set{_digest(str(list(members)))}-" if members else ""
    return str(path / f"{job}-epoch{epoch}-{process_set}")


def prune() -> None:
    """Remove all but the newest files of the default folder."""
    with contextlib.suppress(OSError):
        folder = runtime_folder()
        if not is_ours(folder, may_be_missing=False):  # a link to files that are to stay
            return
        files = [(file.lstat().st_mtime, file) for file in folder.glob("*.jsonl")]
        for _, file in sorted(files, reverse=True)[KEPT_FILES:]:
            file.unlink(missing_ok=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
