"""Horovod's exceptions."""

from __future__ import annotations

from typing import Any

from kolovod.errors import CollectiveError as HorovodInternalError

__all__ = [
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "get_version_mismatch_message",
]


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed. ``skip_sync``: no rank needs another's state."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework has another version than the one that was expected."""

    def __init__(self, name: str, version: Any, installed_version: Any) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: Any, installed_version: Any) -> str:
    """Return the text of an error about a framework's version."""
    return (
        f"{name} {installed_version} is installed, but {version} was expected. Kolovod is compiled "
        f"against no framework and needs no new installation for another {name}"
    )
