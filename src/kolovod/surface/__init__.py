"""The names that all front ends export: the world by ``world``, the verbs by ``bind``.

A front end begins with ``from kolovod.surface.world import *``, and binds the verbs of its
collectives. ``verbs``, ``in_place`` and ``transfers`` have nothing at run time: they tell type
checkers which names ``bind`` brings.
"""

from __future__ import annotations

from typing import Any

from kolovod.core.verbs import VERBS
from kolovod.surface import world

__all__ = ["bind"]

_BESIDE = ("poll", "synchronize", "isend", "irecv")


def bind(names: dict[str, Any], *owners: Any, in_place: bool = True) -> list[str]:
    """Put the verbs that ``owners`` have into ``names``, a module's; return what it exports.

    These are the verbs, what the module has of ``surface.world``, and nothing else. Verbs in place
    are left out if ``in_place`` is not set, for arrays that cannot be changed.
    """
    forms = [form for verb in VERBS.values() for form in verb.forms]
    if not in_place:
        forms = [form for form in forms if not form.endswith("_")]
    exported = [name for name in world.__all__ if name in names]
    for owner in owners:
        for name in (*forms, *_BESIDE):
            if hasattr(owner, name):
                names[name] = getattr(owner, name)
                exported.append(name)
    return exported
