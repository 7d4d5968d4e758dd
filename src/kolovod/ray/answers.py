"""Answers of actors, also when their connections break.

When a connection to an actor closes, Ray says that the actor is unavailable, and not whether the
call has run. The actor may live on, and the next call reach it by a new connection; only Ray's
later word that the actor has died is final.
"""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

__all__ = ["answer"]

_AWAY_S = 60.0
"""For Ray to reach an actor again, or to say that it has died."""
_PAUSE_S = 0.2


def answer(method: Any, *arguments: Any) -> Any:
    """Return the answer of an actor's ``method``, calling it again if the connection breaks.

    So it may run twice, and must then have the effect of one call. Raises what it raises, and
    RayActorError if the actor has died, or cannot be reached for a minute.
    """
    deadline = time.monotonic() + _AWAY_S
    while True:
        try:
            return ray.get(method.remote(*arguments))
        except ActorUnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
