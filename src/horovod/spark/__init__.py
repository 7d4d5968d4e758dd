"""Horovod's names for Spark, without estimators: the guide to Spark has what to use instead."""

from __future__ import annotations

from kolovod.optional_dependencies import missing as _missing

if _error := _missing("spark"):
    raise _error

from horovod.spark import conf
from horovod.spark.runner import run, run_elastic

__all__ = ["conf", "run", "run_elastic"]
