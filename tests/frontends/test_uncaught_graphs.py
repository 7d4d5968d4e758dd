"""An exception on one rank while another is inside a compiled function: TensorFlow's and JAX's."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
from forked import run_jax_ranks, run_tensorflow_ranks
from frameworks import is_installed
from slow import slow_but
from waiting import Marks, until

import kolovod
from kolovod.core.world import current
from kolovod.testing import RankFailed

pytestmark = pytest.mark.frameworks

IN_PYTHON = "in Python"


def hear(where, wait, fail, folder):
    """Rank 1 fails in Python or, elsewhere, by ``fail()``; the others note what ``wait()`` says."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, which then wants all to end
    kolovod.init()
    pids = kolovod.allgather_object(os.getpid())
    inside = Marks(folder / "inside")
    if kolovod.rank() == 1:
        inside.wait_for(0, 2)
        if where == IN_PYTHON:
            raise ValueError("loss is nan")
        fail()
    rank, engine = kolovod.rank(), current().engine

    def note() -> None:
        until(lambda: engine.pending() > 0, "the function submits its operation")
        inside.make(rank)

    threading.Thread(target=note, daemon=True).start()
    try:
        wait()
    except Exception as error:
        (folder / str(kolovod.rank())).write_text(str(error).replace(str(pids[1]), "PID"))
        raise


def check(where, run_ranks, work, folder, module):
    """``module``: where the error is from, unless it is raised in Python."""
    with pytest.raises(RankFailed, match="loss is nan") as caught:
        run_ranks(3, work, timeout_s=100)
    assert caught.value.rank == 1
    text = "ValueError: loss is nan" if where == IN_PYTHON else module
    for rank in (0, 2):
        said = (folder / str(rank)).read_text()
        assert f"rank 1 on host localhost (pid PID) aborted: {text}" in said


@pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")
@pytest.mark.parametrize("where", slow_but(("in an op",), (IN_PYTHON, "in an op")))
def test_others_are_inside_a_tf_function(where, tmp_path):
    def work(rank):
        import tensorflow as tf

        import kolovod.tensorflow as kv

        @tf.function
        def step(x):
            return kv.allreduce(x, name="gradient")

        @tf.function
        def checked(x):
            with tf.control_dependencies([tf.debugging.assert_near(x, x, message="loss is nan")]):
                return kv.allreduce(x, name="gradient")

        hear(where, lambda: step(tf.ones(3)), lambda: checked(tf.fill(3, np.nan)), tmp_path)

    check(where, run_tensorflow_ranks, work, tmp_path, "tensorflow.python.")


@pytest.mark.skipif(not is_installed("jax"), reason="JAX is not installed")
@pytest.mark.parametrize("where", slow_but(("in a callback",), (IN_PYTHON, "in a callback")))
def test_others_are_inside_a_jitted_function(where, tmp_path):
    def work(rank):
        import jax
        import jax.numpy as jnp

        import kolovod.jax as kv

        @jax.jit
        def step(x):
            return kv.allreduce(x, name="gradient")

        def failing(x):
            raise ValueError("loss is nan")

        @jax.jit
        def checked(x):
            return kv.allreduce(jax.pure_callback(failing, x, x), name="gradient")

        def run(function):
            jax.block_until_ready(function(jnp.ones(3)))

        hear(where, lambda: run(step), lambda: run(checked), tmp_path)

    check(where, run_jax_ranks, work, tmp_path, "jax")
