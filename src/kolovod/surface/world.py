"""The names that have nothing to do with a framework."""

from __future__ import annotations

from kolovod.core.handles import Handle
from kolovod.core.objects import Objects as _Objects
from kolovod.core.ops import Adasum, Average, Max, Min, Op, Product, Sum
from kolovod.core.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from kolovod.core.rank_info import cross_rank, cross_size, local_rank, local_size, rank, size
from kolovod.core.spans import span
from kolovod.core.world import current as _current
from kolovod.core.world import is_initialized
from kolovod.elastic import job_membership as _  # noqa: F401  init() asks it for the next world
from kolovod.lifecycle import init, shutdown
from kolovod.observe.metrics_server import start_metrics_server, stop_metrics_server
from kolovod.observe.timeline import start_timeline, stop_timeline

_objects = _Objects(_current)
broadcast_object = _objects.broadcast_object
allgather_object = _objects.allgather_object

__all__ = [
    "Adasum",
    "Average",
    "Handle",
    "Max",
    "Min",
    "Op",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "span",
    "start_metrics_server",
    "start_timeline",
    "stop_metrics_server",
    "stop_timeline",
]
