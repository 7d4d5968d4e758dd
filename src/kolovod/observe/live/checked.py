"""A check of what a process shows, before anything is made of it: it is its user's word. PURE.

Whoever holds a file in memory of the right name is taken for a rank, by root's ``kolovod ps`` too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kolovod.observe.whereabouts import parse_whereabouts
from kolovod.printable import printable

__all__ = ["checked"]

_MOST = 1 << 20  # ranks, epochs of a job take longer to come to
_MOST_NS = 1 << 62
_Check = Callable[[Any], bool]


def checked(facts: Any) -> dict[str, Any] | None:
    """Return ``facts``, with text that a terminal can show; None: something makes no sense."""
    if not isinstance(facts, dict):
        return None
    if not all(is_right(facts[name]) for name, is_right in _FIELDS.items() if name in facts):
        return None
    if "rank" in facts:
        whole = all(name in facts for name in ("size", "epoch", "host", "hosts", "job", "slot"))
        if not whole or not facts["hosts"] or facts["rank"] >= facts["size"]:
            return None
    if "at_ns" in facts and not ("pending" in facts and "sent_bytes" in facts):
        return None
    shown: dict[str, Any] = _shown(facts)
    return shown


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if isinstance(value, dict):
        return {printable(name): _shown(each) for name, each in value.items()}
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST_NS


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value <= _MOST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _MOST_NS  # NaN is not


def _is_anything(value: Any) -> bool:
    return True


def _list_of(is_right: _Check) -> _Check:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


def _row(*checks: _Check) -> _Check:
    def is_right(value: Any) -> bool:
        is_list = isinstance(value, list) and len(value) == len(checks)
        return is_list and all(check(each) for check, each in zip(checks, value, strict=True))

    return is_right


def _object(**checks: _Check) -> _Check:
    return lambda value: (
        isinstance(value, dict)
        and all(name in value and check(value[name]) for name, check in checks.items())
    )


def _is_whereabouts(value: Any) -> bool:
    try:
        parse_whereabouts(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_stats(value: Any) -> bool:
    return isinstance(value, dict) and _is_number(value.get("link_bytes_per_us", 0))


_OPERATION = _row(*[_is_text] * 4, *[_is_whole] * 3, _is_anything, *[_is_whole] * 3)
_SPAN = _row(_is_text, _is_text, _is_whole, _is_whole, _list_of(_is_number))
_FIELDS: dict[str, _Check] = {
    "worlds": _list_of(_object(epoch=_is_count, size=_is_count)),
    "notices": _list_of(_is_text),
    "rank": _is_count,
    "size": _is_count,
    "epoch": _is_count,
    "host": _is_text,
    "hosts": _list_of(_is_text),
    "backend": _is_text,
    "job": _is_text,
    "slot": lambda value: value is None or _is_count(value),
    "at_ns": _is_whole,
    "pending": _list_of(_row(_is_text, _is_text, _is_text, _is_whole)),
    "stats": _is_stats,
    "sent_bytes": _list_of(_is_whole),
    "whereabouts": _is_whereabouts,
    "reports": _list_of(
        _object(
            number=_is_whole, operations=_list_of(_OPERATION), spans=_list_of(_SPAN), lost=_is_whole
        )
    ),
}
"""By the name of each that is used (``showing`` writes them)."""
