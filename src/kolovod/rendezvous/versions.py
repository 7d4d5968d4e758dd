"""The releases of Kolovod that understand each other: those that have one protocol.

Who connects says both, in its first message after the handshake (net/channel.py), as
``"protocol"`` and ``"version"``. These two, and which rank it is, must be found in the messages of
every release.
"""

from __future__ import annotations

from typing import Any

from kolovod import _native
from kolovod.errors import BootstrapError
from kolovod.net import messages
from kolovod.version import __version__

__all__ = ["ADVICE", "OURS", "find_other", "own"]

ADVICE = "install the same version of Kolovod everywhere"
_MAX_PROTOCOL = (1 << 32) - 1
_MAX_VERSION = 64


def _describe(protocol: int, version: str) -> str:
    return f"Kolovod {version} (protocol {protocol})"


OURS = _describe(_native.PROTOCOL, __version__)
"""This release, for messages."""


def own() -> dict[str, Any]:
    """Return the part of a first message that says which release this is."""
    return {"protocol": _native.PROTOCOL, "version": __version__}


def find_other(message: Any) -> str | None:
    """Return the release that ``message`` is from, for messages; None: it has our protocol."""
    try:
        protocol = messages.whole(message, "protocol", 0, _MAX_PROTOCOL)
        version = messages.text(message, "version", _MAX_VERSION)
    except BootstrapError:
        return "a Kolovod that does not say its version"
    return None if protocol == _native.PROTOCOL else _describe(protocol, version)
