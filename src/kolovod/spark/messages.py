"""The messages between the driver and the tasks of a job in Spark, over a ``Channel``.

A task connects, and proves the secret that came to it within Spark's own call; all that follows is
encrypted, since it holds the job's secret and what ranks write::

    task -> driver   {"hello": {"host", "address", "torch_port", "pids"}}
                     {"began": [number, pid]}
                     {"output": [number, stream, bytes]}
                     {"result": bytes}      a part of what the process has returned
                     {"ended": [number, pid, code, whom it blames or null, its record as JSON]}
                     {"gone": [number, whether it is]}
                     {"alive": true}        once a second
    driver -> task   {"payload": bytes}     a part of the payload of the next process
                     {"start": [number, command, environment]}
                     {"signal": number}     for the process that runs
                     {"watch": [number, pid]}   of another task of this host, which has ended
                     {"close": true}
                     {"alive": true}

Bytes are in base64. A message is not over a MiB (``net.channel``).
"""

from __future__ import annotations

import base64
import binascii
import reprlib
from collections.abc import Iterator
from typing import Any

from kolovod.errors import ClusterError
from kolovod.net import messages

__all__ = [
    "ALIVE_S",
    "LABEL",
    "LOST_AFTER_S",
    "SEND_S",
    "packed",
    "parts",
    "row",
    "unpacked",
    "whole",
]

LABEL = "spark task"
ALIVE_S = 1.0
LOST_AFTER_S = 20.0
"""Without a sign of life."""
SEND_S = 20.0
_PART_BYTES = 1 << 19


def packed(data: bytes) -> str:
    """Return bytes as text for a message."""
    return base64.b64encode(data).decode("ascii")


def unpacked(value: Any) -> bytes:
    """Return the bytes that ``packed`` has packed. Raises BootstrapError."""
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise ClusterError(f"a message of a Spark task has no bytes: {error}") from error


def parts(data: bytes) -> Iterator[str]:
    """Yield ``data`` for as many messages as it needs; at least one."""
    for start in range(0, max(1, len(data)), _PART_BYTES):
        yield packed(data[start : start + _PART_BYTES])


def row(message: Any, name: str, length: int) -> list[Any]:
    """Return the list of that length under ``name``. Raises BootstrapError."""
    value = messages.mapping(message).get(name)
    if not isinstance(value, list) or len(value) != length:
        raise ClusterError(f"a message of a Spark task has no {name} of {length}")
    return value


def whole(value: Any, name: str) -> int:
    """Return a whole number out of the list under ``name``. Raises BootstrapError."""
    if type(value) is not int:
        raise ClusterError(
            f"a message of a Spark task has {reprlib.repr(value)} in {name}: expected a whole "
            "number"
        )
    return value
