"""Horovod's verbs on TensorFlow's tensors, and what a graph can ask for when it is run."""

from __future__ import annotations

import kolovod.tensorflow as kv
from horovod.common import surface as _surface
from horovod.common.surface import *
from horovod.common.uninitialized import through_horovod
from horovod.tensorflow.functions import broadcast_
from horovod.tensorflow.moves import allgather, alltoall, broadcast, grouped_allgather, join
from horovod.tensorflow.reductions import (
    _allreduce,
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)

__all__ = [
    "_allreduce",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += _surface.__all__

rank_op = through_horovod(kv.rank_op)
size_op = through_horovod(kv.size_op)
local_rank_op = through_horovod(kv.local_rank_op)
local_size_op = through_horovod(kv.local_size_op)
process_set_included_op = through_horovod(kv.process_set_included_op)
