"""Parts of TensorFlow that its documentation does not promise, and ``kolovod.keras`` uses."""

from __future__ import annotations

import tensorflow as tf

__all__ = ["is_for_xla"]


def is_for_xla() -> bool:
    """Return whether the graph that is being traced is for XLA; False where nobody can tell."""
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
