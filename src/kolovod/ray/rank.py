"""A rank in a Ray actor: the actor's process is the rank's."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping, Sequence

from kolovod import lifecycle
from kolovod.launch.function import end_world_by, record_of_call
from kolovod.memory_files import is_pipe_of, open_checked

__all__ = ["RankActor"]


class RankActor:
    """One process of a job. Its methods are called on the actor's main thread."""

    def __init__(self, name: str) -> None:
        """``name``: for Ray's log and its dashboard."""
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def begin(self, outputs: Sequence[str]) -> int:
        """Write from now on into these pipes (``NodeMonitor``); return the process id."""
        for stream, fd, path in zip((sys.stdout, sys.stderr), (1, 2), outputs, strict=True):
            stream.flush()
            # The node monitor may be gone, and its number another process's.
            pipe = open_checked(path, is_pipe_of(os.geteuid()), os.O_WRONLY)
            os.set_blocking(pipe, True)
            os.dup2(pipe, fd)
            os.close(pipe)
        faulthandler.enable()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in other ranks, which may leave by it
        return os.getpid()

    def call(self, variables: Mapping[str, str], payload: bytes) -> tuple[int, bytes]:
        """Be the rank that ``variables`` tell of; return its process's exit code, and its record.

        ``payload``: see ``function.packed_call``.
        """
        os.environ.update(variables)
        record, code = b"", 0
        try:
            record, error = record_of_call(payload, keeps_path=True)
            if error is not None:
                end_world_by(error)
                code = 1
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
        lifecycle.leave_at_exit()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        return code, record
