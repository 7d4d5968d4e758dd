"""Ranks in Spark: ``kolovod.spark.run(fn, num_proc=4)``."""

from __future__ import annotations

from kolovod.launch.function import RankFailed
from kolovod.optional_dependencies import missing as _missing

if _error := _missing("spark"):
    raise _error

from kolovod.spark.run import run, run_elastic

__all__ = ["RankFailed", "run", "run_elastic"]
