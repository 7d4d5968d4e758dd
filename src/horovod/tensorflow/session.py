"""Functions for the graphs and sessions of TensorFlow 1 only."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.common.process_sets import global_process_set
from horovod.tensorflow.functions import broadcast_variables


def broadcast_global_variables(root_rank: int) -> Any:
    """Overwrite all variables of the default graph with the root's: an op to be run in a session.

    Raises RuntimeError outside of such a graph.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables is for graphs of TensorFlow 1: use "
            "hvd.broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank, global_process_set)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all variables when a tf.compat.v1.train.MonitoredTrainingSession has been made."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """``device`` has no effect: the engine works in host memory."""
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Add the op to the graph that is being finished."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the op."""
        session.run(self.bcast_op)
