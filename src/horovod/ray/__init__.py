"""Horovod's names for Ray: executors that call functions in a world of actors."""

from __future__ import annotations

from kolovod.optional_dependencies import missing as _missing

if _error := _missing("ray"):
    raise _error

from horovod.ray.elastic import ElasticRayExecutor
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor"]
