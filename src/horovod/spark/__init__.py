"""Horovod's names for Spark. Estimators are not among them: docs/spark.md has what to use."""

from __future__ import annotations

from kolovod.optional_dependencies import missing as _missing

if _error := _missing("spark"):
    raise _error

from horovod.spark import conf
from horovod.spark.runner import run, run_elastic

__all__ = ["conf", "run", "run_elastic"]
