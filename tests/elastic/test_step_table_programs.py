"""The elastic step of TensorFlow, Keras and JAX; see ``test_step_table.py``.

Rows are drawn in ``tests/support/elastic_program_rows.py``; ranks are processes that are killed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import elastic_programs
import pytest
from elastic_program_rows import OF_JAX, OF_KERAS, OF_TENSORFLOW, chosen
from exchange_rows import Has
from forked import (
    KERAS_2,
    KERAS_RUNNERS,
    QUICKLY_COMPILED,
    ranks_after,
    run_tensorflow_ranks,
)
from frameworks import is_installed
from slow import THOROUGH, slow_but

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]
run_jax_ranks = ranks_after(
    "optax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)


def check(which: str, start: Callable[..., Any], has: Has, count: int, *modules: str) -> None:
    """So many rows of a front end, which needs ``modules``."""
    for module in modules:
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")
    elastic_programs.run(start, which, chosen(has, count))


@pytest.mark.parametrize("count", [*slow_but([6], [6, 24]), pytest.param(80, marks=THOROUGH)])
def test_tensorflow(count: int) -> None:
    check("tensorflow", run_tensorflow_ranks, OF_TENSORFLOW, count, "tensorflow")


@pytest.mark.slow
@pytest.mark.parametrize("count", [6, 24, pytest.param(80, marks=THOROUGH)])
def test_jax(count: int) -> None:
    check("jax", run_jax_ranks, OF_JAX, count, "jax", "optax")


@pytest.mark.slow
@pytest.mark.parametrize("which", KERAS_RUNNERS)
def test_keras(which: str) -> None:
    _check_keras(which, 6)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", KERAS_RUNNERS)
def test_many_of_keras(which: str) -> None:
    _check_keras(which, 40)


def _check_keras(which: str, count: int) -> None:
    name = "keras 2" if which == "tf_keras" else f"keras on {which}"
    modules = (KERAS_2,) if which == "tf_keras" else ("keras", which)
    check(name, KERAS_RUNNERS[which], OF_KERAS, count, *modules)
