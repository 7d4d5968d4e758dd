"""The fields of a message from another process, each checked before anything is done with it.

A message is one JSON value (channel.py). Its sender knows the secret, but may be another version,
or out of its mind: whatever it says, the answer is one BootstrapError that names the field.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

from kolovod.errors import BootstrapError

__all__ = ["MAX_RANKS", "config", "flag", "flags", "mapping", "number", "text", "whole", "wholes"]

MAX_RANKS = 1 << 16
_INT64 = 1 << 63


def mapping(message: Any) -> dict[str, Any]:
    """Return ``message``, which must be an object."""
    if not isinstance(message, dict):
        raise _malformed("it", message, "an object")
    return message


def whole(message: Any, name: str, low: int, high: int) -> int:
    """Return a whole number from ``low`` to ``high``."""
    value = _field(message, name)
    if type(value) is not int or not low <= value <= high:
        raise _malformed(name, value, f"a whole number from {low} to {high}")
    return value


def wholes(message: Any, name: str, low: int, high: int) -> list[int]:
    """Return a list of whole numbers from ``low`` to ``high``."""
    values = _field(message, name)
    if not isinstance(values, list) or any(
        type(value) is not int or not low <= value <= high for value in values
    ):
        raise _malformed(name, values, f"whole numbers from {low} to {high}")
    return values


def number(message: Any, name: str, high: float) -> float:
    """Return a number over 0 and up to ``high``."""
    value = _field(message, name)
    if type(value) not in (int, float) or not 0 < value <= high:
        raise _malformed(name, value, f"a number over 0 and up to {high:g}")
    return float(value)


def text(message: Any, name: str, most: int) -> str:
    """Return a text of at most ``most`` characters, none of which moves a terminal's cursor."""
    value = _field(message, name)
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise _malformed(name, value, f"at most {most} printable characters")
    return value


def printable(value: str, most: int) -> str:
    """Return ``value`` as ``text`` takes it, with other characters as Python writes them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value[:most])[:most]


def flag(message: Any, name: str) -> bool:
    """Return true or false."""
    value = _field(message, name)
    if not isinstance(value, bool):
        raise _malformed(name, value, "true or false")
    return value


def flags(message: Any, name: str, count: int) -> list[bool]:
    """Return a list of exactly ``count`` times true or false."""
    values = _field(message, name)
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(isinstance(value, bool) for value in values)
    ):
        raise _malformed(name, values, f"{count} times true or false")
    return values


def config(message: Any, names: Iterable[str]) -> dict[str, int]:
    """Return the native engine's configuration, "config": exactly ``names``, int64 each."""
    values = _field(message, "config")
    expected = set(names)
    if not isinstance(values, dict) or set(values) != expected:
        given = sorted(expected ^ set(values)) if isinstance(values, dict) else values
        raise _malformed("config", given, "the names of this version: do all ranks have the same?")
    return {name: whole(values, name, -_INT64, _INT64 - 1) for name in values}


def _field(message: Any, name: str) -> Any:
    message = mapping(message)
    if name not in message:
        raise BootstrapError(f"a malformed message: {name!r} is missing")
    return message[name]


def _malformed(name: str, value: Any, expected: str) -> BootstrapError:
    # Shortened, since it may be a megabyte.
    return BootstrapError(
        f"a malformed message: {name} is {reprlib.repr(value)}; expected {expected}"
    )
