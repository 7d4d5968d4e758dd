"""The exchange: what optimizers step with is, bit for bit, what NumPy makes of all ranks' inputs.

One table for all front ends: rows are drawn in ``tests/support/exchange_rows.py``, replayed in
``exchanges.py``. A row that fails is printed as Python: put it into ``ONCE_FAILED`` to repeat it.
"""

from __future__ import annotations

import exchange_numpy
import exchange_programs
import pytest
from exchange_rows import (
    JAX,
    JAX_SHARDED,
    KERAS,
    NUMPY,
    NUMPY_PROCESSES,
    TENSORFLOW,
    TORCH,
    TORCH_PROCESSES,
    deterministic,
    drawn,
    each,
    rows,
)
from exchanges import Parameter, Row, Step, run_processes
from forked import (
    KERAS_2,
    KERAS_RUNNERS,
    QUICKLY_COMPILED,
    ranks_after,
    run_ranks,
    run_tensorflow_ranks,
    run_torch_ranks,
)
from frameworks import is_installed
from hypothesis import given
from slow import slow_but

run_jax_ranks = ranks_after(
    "optax", "kolovod.jax", JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", **QUICKLY_COMPILED
)
ONCE_FAILED = [
    # A rank without a piece of any parameter clips values.
    Row(steps=(Step(), Step("clip")), parameters=(Parameter(()),), sharded=True),
    # Clipping, and throwing away, are the first thing that an optimizer of a world of one sees in
    # a larger one.
    Row(((0,), (0, 0)), steps=(Step("clip"), Step())),
    Row(((0,), (0, 0)), steps=(Step("clip"), Step()), op="Sum", passes=2),
    Row(((0,), (0, 0)), steps=(Step("set to none"), Step())),
    # What is thrown away was sent by the one rank, and not by the other.
    Row(
        parameters=(Parameter((3,)), Parameter((3,))),
        steps=(Step(), Step("set to none", ((0, 0, 1),)), Step("set to none", ((1, 0, 1),))),
        op="Sum",
    ),
    # Several tensors that are encoded.
    Row(
        ((0, 1),), (Parameter((30, 70)), Parameter((1, 1100)), Parameter((3,))), compression="int4"
    ),
    # An optimizer and a compressor that go on from their states.
    Row(((0, 0, 0),), (Parameter((5, 7)), Parameter((2,))), compression="signs", resumed=True),
    Row(((0, 0, 0), (0, 0)), (Parameter((5, 7)), Parameter((2,))), sharded=True, resumed=True),
    # A step in which no rank has a gradient: nobody may send what a compressor has kept.
    Row(
        parameters=(Parameter((9, 40)),),
        steps=(Step(), Step("clip", ((0, 0, 0), (1, 0, 0))), Step()),
        compression="signs",
    ),
]


@pytest.mark.parametrize("row", ONCE_FAILED, ids=range(len(ONCE_FAILED)))
def test_rows_of_pytorch_that_have_failed(row: Row) -> None:
    _run_torch(row)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", slow_but([30], [30, 60, 160]))
def test_pytorch(count: int) -> None:
    each(_run_torch, drawn(TORCH, count))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1500)
@given(rows(TORCH))
@deterministic(4000)
def test_many_of_pytorch(row: Row) -> None:
    _run_torch(row)


def test_pytorch_on_processes() -> None:
    """Which the module's own verbs serve; worlds grow and shrink by ``init`` and ``shutdown``."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    import exchange_torch

    run_processes(run_torch_ranks, exchange_torch.on_processes, drawn(TORCH_PROCESSES, 20))


def test_numpy() -> None:
    each(exchange_numpy.run, drawn(NUMPY, 60))


def test_numpy_on_processes() -> None:
    run_processes(run_ranks, exchange_numpy.on_processes, drawn(NUMPY_PROCESSES, 12))


@pytest.mark.frameworks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", slow_but([8], [8, 40]))
def test_tensorflow(count: int) -> None:
    _needs("tensorflow")
    rows = drawn(TENSORFLOW, count)
    run_processes(run_tensorflow_ranks, exchange_programs.InTensorflow.of_rows, rows)


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [8, 40])
def test_jax(count: int) -> None:
    _needs("jax", "optax")
    run_processes(run_jax_ranks, exchange_programs.InJax.of_rows, drawn(JAX, count))


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [6, 24])
def test_jax_with_shards(count: int) -> None:
    """Programs with shards are for one world: what is traced before is traced anew."""
    _needs("jax", "optax")
    run_processes(run_jax_ranks, exchange_programs.InJax.of_rows, drawn(JAX_SHARDED, count))


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("which", KERAS_RUNNERS)
def test_keras(which: str) -> None:
    _needs(*{"tf_keras": (KERAS_2,), "jax": ("keras", "jax")}.get(which, ("keras", which)))
    work = exchange_programs.KERAS[which].of_rows
    # Programs that are traced in a world of one send gradients in a larger one.
    run_processes(
        KERAS_RUNNERS[which],
        work,
        drawn(KERAS, 20 if which == "torch" else 6),
        KOLOVOD_ELASTIC="1",
    )


def _needs(*modules: str) -> None:
    for module in modules:
        if not is_installed(module):
            pytest.skip(f"{module} is not installed")


def _run_torch(row: Row) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    import exchange_torch

    exchange_torch.run(row)
