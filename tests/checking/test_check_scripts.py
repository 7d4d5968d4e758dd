"""``kolovod check`` of scripts that have one mistake each, and of one that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from checked_scripts import CASES, Case
from slow import THOROUGH, thorough_but

QUICK = ("good",)  # of all others the facts are compared in test_compare.py, too
OFTEN = (
    "no broadcast",
    "not wrapped",
    "never initialized",
    "no sampler",
    "no set_epoch",
    "unequal batches",
    "the same seed",
    "all write",
    "batch norm",
    "one rank waits",
)
UNEVEN = ("unequal batches", "one rank waits")  # where a rank waits until that is late
SOON_LATE = {"KOLOVOD_LATE_FAILURE_S": "4", "KOLOVOD_LATE_REPORT_S": "1"}
SLOW = [pytest.mark.slow]
DEADLINE_S = 110


class Checked(NamedTuple):
    """How it went."""

    code: int
    report: str
    findings: list[dict[str, Any]]

    def verdicts(self, verdict: str) -> dict[str, str]:
        return {f["check"]: f["found"] for f in self.findings if f["verdict"] == verdict}


def check(folder: Path, script: str, *flags: str, **variables: str) -> Checked:
    (folder / "train.py").write_text(script)
    arguments = ["--json", "found.json", *flags, "--", sys.executable, "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "kolovod", "check", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stderr == "", done.stderr
    found = json.loads((folder / "found.json").read_text())
    assert found["exit_code"] == done.returncode
    return Checked(done.returncode, done.stdout, found["findings"])


def judge(checked: Checked, case: Case) -> None:
    """What was to be found, and no other problem."""
    problems = {name for name, text in case.expected.items() if text.startswith("PROBLEM")}
    assert set(checked.verdicts("PROBLEM")) == problems, checked.report
    assert checked.code == bool(problems)
    for name, text in case.expected.items():
        verdict, _, part = text.partition(": ")
        assert part in checked.verdicts(verdict)[name], checked.report
    if case.line:
        first = next(f for f in checked.findings if f["check"] == next(iter(case.expected)))
        file, _, number = first["line"].partition(":")
        assert file == "train.py"
        assert case.line in case.script.splitlines()[int(number) - 1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else SLOW if name in OFTEN else THOROUGH)
        for name in CASES
    ],
)
def test_one_mistake(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    checked = check(tmp_path, case.script, **(SOON_LATE if name in UNEVEN else {}))
    judge(checked, case)
    if name == "good":
        assert not checked.verdicts("hint"), checked.report
        assert not checked.verdicts("cannot tell"), checked.report


@pytest.mark.slow
def test_short_epochs(tmp_path: Path) -> None:
    case = CASES["all write"]
    steps = check(tmp_path, case.script, "--steps", "3")
    assert "files" in steps.verdicts("cannot tell"), steps.report
    (tmp_path / "train.py").unlink()
    script = case.script.replace("    sampler.set_epoch(epoch)\n", "")
    epochs = check(tmp_path, script, "--steps", "3", "--epochs", "2")
    assert set(epochs.verdicts("PROBLEM")) == {"files", "epochs"}, epochs.report
    assert epochs.verdicts("ok")["steps"] == "all ranks have taken 6 steps"
    assert epochs.verdicts("ok")["batches"] == "an epoch has 8 batches on all ranks"


KERAS = """
import numpy as np
import keras
import kolovod.keras as kv

kv.init()
keras.utils.set_random_seed(kv.rank())
x, y = np.random.default_rng(1).normal(size=(2, 64, 4))
x, y = x[kv.rank()::kv.size()], y[kv.rank()::kv.size()]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(4)])
optimizer = kv.DistributedOptimizer(keras.optimizers.SGD(0.1))
model.compile(optimizer=optimizer, loss="mse")
callbacks = [kv.callbacks.BroadcastGlobalVariablesCallback(), kv.callbacks.MetricAverageCallback()]
shown = 2 if kv.rank() == 0 else 0
model.fit(x, y, batch_size=8, epochs=3, callbacks=callbacks, verbose=shown)
if kv.rank() == 0:
    model.save("model.keras")
"""
KERAS_CHANGES = (
    ("kv.DistributedOptimizer(keras.optimizers.SGD(0.1))", "keras.optimizers.SGD(0.1)"),
    ("[kv.callbacks.BroadcastGlobalVariablesCallback(), ", "["),
    ("x, y = x[kv.rank()::kv.size()], y[kv.rank()::kv.size()]\n", ""),
    ("if kv.rank() == 0:\n    model.save", "if True:\n    model.save"),
    ('keras.layers.Dense(8, "relu")', "keras.layers.BatchNormalization()"),
)


BACKENDS = ("tensorflow", "torch", "jax")


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize("backend", thorough_but(["tensorflow"], BACKENDS))
def test_keras(tmp_path: Path, backend: str) -> None:
    pytest.importorskip("keras", reason="Keras is not installed")
    good = check(tmp_path, KERAS, "--steps", "100", KERAS_BACKEND=backend)
    judge(good, Case((), {}))
    assert good.verdicts("hint") == good.verdicts("cannot tell") == {}, good.report


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize("backend", thorough_but(["torch"], BACKENDS))
def test_keras_with_mistakes(tmp_path: Path, backend: str) -> None:
    pytest.importorskip("keras", reason="Keras is not installed")
    script = KERAS
    for old, new in KERAS_CHANGES:
        assert script.count(old) == 1
        script = script.replace(old, new)
    bad = check(tmp_path, script, "--steps", "4", "--epochs", "3", KERAS_BACKEND=backend)
    assert set(bad.verdicts("PROBLEM")) == {
        "initial-weights", "optimizer", "weights", "data", "files"
    }, bad.report  # fmt: skip
    assert "batch-norm" in bad.verdicts("hint"), bad.report
    assert bad.verdicts("ok")["steps"] == "all ranks have taken 12 steps"


JAX = """
import jax
import numpy as np
import jax.numpy as jnp
import kolovod.jax as kv

kv.init()
params = kv.broadcast_pytree({"w": jnp.zeros(4)})
gradient = jax.jit(jax.grad(lambda p, x: ((x @ p["w"] - 1) ** 2).mean()))
for step in range(3):
    mine = gradient(params, np.random.rand(8, 4).astype(np.float32))
    mean = {"w": kv.allreduce(mine["w"], "gradients.w")}
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
"""


@pytest.mark.slow
@pytest.mark.frameworks
def test_what_the_engine_knows(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    good = check(tmp_path, JAX)
    judge(good, Case((), {}))
    expected = "gradients were combined in 3 operations at least"
    assert good.verdicts("ok")["optimizer"] == expected, good.report
    assert "but parameters were broadcast" in good.verdicts("cannot tell")["initial-weights"]
    bad = check(tmp_path, JAX.replace('kv.allreduce(mine["w"], "gradients.w")', 'mine["w"]'))
    assert set(bad.verdicts("PROBLEM")) == {"optimizer"}, bad.report
