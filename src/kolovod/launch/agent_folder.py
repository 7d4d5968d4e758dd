"""The folder by which launchers find an agent that lasts."""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from pathlib import Path

from kolovod.core import runtime_folder
from kolovod.errors import BootstrapError
from kolovod.launch.folder_locks import hold, is_held
from kolovod.net.unix_sockets import listen_at

__all__ = ["AgentFolder"]


class AgentFolder:
    """The folder of an agent. A context manager: leaving it removes the folder."""

    def __init__(self, name: str, forget_after_s: float) -> None:
        """``forget_after_s``: what killed agents have left is removed when it is so old.

        Raises BootstrapError, and OSError if another agent of this name lives.
        """
        self._name = name
        self.listener = self._made()
        _forget_killed(self._path.parent, forget_after_s)

    def __enter__(self) -> AgentFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        shutil.rmtree(self._path, ignore_errors=True)

    def _made(self) -> socket.socket:
        self._path = runtime_folder.made("agents", self._name)
        hold(self._path)
        return listen_at(self._path / "socket")

    def stay_found(self) -> None:
        """Make it anew if somebody has removed it; ``listener`` is another one then."""
        if not (self._path / "socket").exists():
            with contextlib.suppress(OSError, BootstrapError):  # no room is left, say
                before, self.listener = self.listener, self._made()
                before.close()


def _forget_killed(folders: Path, after_s: float) -> None:
    for folder in folders.iterdir():
        with contextlib.suppress(OSError):  # it is gone
            if not is_held(folder) and folder.stat().st_mtime < time.time() - after_s:
                shutil.rmtree(folder)
