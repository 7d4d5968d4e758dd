"""Ranks in Ray: ``kolovod.ray.run(fn, num_workers=4)``."""

from __future__ import annotations

from kolovod.launch.function import RankFailed
from kolovod.optional_dependencies import missing as _missing

if _error := _missing("ray"):
    raise _error

from kolovod.ray.run import run

__all__ = ["RankFailed", "run"]
