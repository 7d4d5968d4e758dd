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
    assert "kolovod.torch" not in bad.report, bad.report


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
def test_a_loop_of_jax_without_an_optimizer(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    good = check(tmp_path, JAX)
    judge(good, Case((), {}))
    assert good.verdicts("ok")["steps"] == "all ranks have taken 3 steps", good.report
    expected = "the script's own update (3 steps): with the gradients of all ranks"
    assert good.verdicts("ok")["optimizer"] == expected, good.report
    bad = check(tmp_path, JAX.replace('kv.allreduce(mine["w"], "gradients.w")', 'mine["w"]'))
    assert set(bad.verdicts("PROBLEM")) == {"optimizer", "weights"}, bad.report


OPTAX = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
import kolovod.jax as kv

kv.init()
random = np.random.default_rng(kv.rank())
params = {"w": jax.random.normal(jax.random.key(kv.rank()), (4, 2)), "b": jnp.zeros(2)}
params = kv.broadcast_pytree(params)
optimizer = kv.DistributedOptimizer(optax.adam(1e-2))
state = optimizer.init(params)
scale = 1.0

@jax.jit
def step(params, state, x, scale):
    def loss_of(params):
        return ((x @ params["w"] + params["b"] - 1) ** 2).mean() * scale

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, kv.allreduce(loss)

for i in range(30):
    x = random.normal(size=(8, 4)).astype(np.float32)
    params, state, loss = step(params, state, x, scale)
print(f"rank {kv.rank()}: loss {float(loss):.4f}")
"""
OPTAX_FAULTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "good": ("", "", {}),
    "not jitted": ("@jax.jit\n", "", {}),
    "no broadcast": (
        "params = kv.broadcast_pytree(params)\n",
        "",
        {
            "initial-weights": "PROBLEM: before the first step 1 of 2 weights differ",
            "weights": "PROBLEM: after 10 steps 1 of 2 weights differ between ranks: they differed",
        },
    ),
    "not wrapped": (
        "kv.DistributedOptimizer(optax.adam(1e-2))",
        "optax.adam(1e-2)",
        {
            "optimizer": "PROBLEM: optax.apply_updates steps with the gradients of its own rank",
            "weights": "PROBLEM: an optimizer that is not wrapped has changed them",
        },
    ),
    "the same data": (
        "default_rng(kv.rank())",
        "default_rng(0)",
        {"data": "PROBLEM: the function that is differentiated was given the same inputs"},
    ),
    "updates changed": (
        "    return optax",
        "    updates = jax.tree.map(lambda u: u * scale, updates)\n    return optax",
        {
            "gradients": "PROBLEM: in step 1 the updates of b, w differ between ranks",
            "weights": "PROBLEM: their gradients differed in the optimizer",
        },
    ),
    "not finite": (
        "    params, state, loss = step",
        "    scale = np.inf if (i, kv.rank()) == (3, 1) else 1.0\n    params, state, loss = step",
        {
            "gradients": "PROBLEM: gradients hold NaN or infinity before they are averaged",
            "weights": "PROBLEM: after 10 steps 2 of 2 weights hold NaN or infinity",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize("name", thorough_but(["good", "not wrapped"], tuple(OPTAX_FAULTS)))
def test_jax(tmp_path: Path, name: str) -> None:
    pytest.importorskip("optax", reason="optax is not installed")
    old, new, expected = OPTAX_FAULTS[name]
    assert not old or OPTAX.count(old) == 1
    script = OPTAX.replace(old, new) if old else OPTAX
    if name == "updates changed":
        script = script.replace("scale = 1.0", "scale = 1.0 + kv.rank()")
    checked = check(tmp_path, script)
    judge(checked, Case((), expected))
    assert checked.verdicts("ok")["steps"] == "all ranks have taken 10 steps", checked.report
    if name != "the same data":
        assert "differ between ranks in all steps" in checked.verdicts("ok")["data"]
    assert "kolovod.torch" not in checked.report
    if name == "not finite":
        assert "rank 1: the gradient of b in step 4, first" in checked.report


NNX = """
import jax
import numpy as np
import optax
from flax import nnx
import kolovod.jax as kv

kv.init()
random = np.random.default_rng(kv.rank())
model = nnx.Sequential(
    nnx.Linear(4, 8, rngs=nnx.Rngs(kv.rank())), nnx.Linear(8, 1, rngs=nnx.Rngs(kv.rank()))
)
nnx.update(model, kv.broadcast_pytree(nnx.state(model)))
optimizer = nnx.Optimizer(model, kv.DistributedOptimizer(optax.adam(1e-2)), wrt=nnx.Param)

@nnx.jit
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda model: ((model(x) - 1) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss

for i in range(30):
    step(model, optimizer, random.normal(size=(8, 4)).astype(np.float32))
"""
EQUINOX = """
import equinox as eqx
import jax
import numpy as np
import optax
import kolovod.jax as kv

kv.init()
random = np.random.default_rng(kv.rank())
model = kv.broadcast_pytree(eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(kv.rank())))
optimizer = kv.DistributedOptimizer(optax.adam(1e-2))
state = optimizer.init(eqx.filter(model, eqx.is_array))

@eqx.filter_jit
def step(model, state, x):
    loss_of = lambda model, x: ((jax.vmap(model)(x) - 1) ** 2).mean()
    grads = eqx.filter_grad(loss_of)(model, x)
    updates, state = optimizer.update(grads, state)
    return eqx.apply_updates(model, updates), state

for i in range(30):
    model, state = step(model, state, random.normal(size=(8, 4)).astype(np.float32))
"""


TAPE = """
import numpy as np
import tensorflow as tf
import kolovod.tensorflow as kv

kv.init()
random = np.random.default_rng(kv.rank())
w, b = tf.Variable(tf.random.normal((4, 2))), tf.Variable(tf.zeros(2))
kv.broadcast_variables([w, b], root_rank=0)

@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((x @ w + b - 1.0) ** 2)
    tape = kv.DistributedGradientTape(tape)
    for variable, gradient in zip([w, b], tape.gradient(loss, [w, b])):
        variable.assign_sub(0.1 * gradient)

for i in range(30):
    step(tf.constant(random.normal(size=(8, 4)), tf.float32))
"""
TAPE_FAULTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "good": ("", "", {"data": "ok: gradients differ between ranks before they are averaged"}),
    "not in a graph": ("@tf.function\n", "", {"data": "ok: gradients differ between ranks before"}),
    "the same data": (
        "default_rng(kv.rank())",
        "default_rng(0)",
        {"data": "PROBLEM: the same on all ranks before they are averaged, in all 10 steps"},
    ),
    "no broadcast": (
        "kv.broadcast_variables([w, b], root_rank=0)\n",
        "",
        {
            "initial-weights": "PROBLEM: before the first step 1 of 2 weights differ",
            "weights": "PROBLEM: after 10 steps 1 of 2 weights differ between ranks: they differed",
        },
    ),
    "not finite": (
        "    step(tf",
        "    random = random if (i, kv.rank()) != (3, 1) else Infinite()\n    step(tf",
        {
            "gradients": "PROBLEM: gradients hold NaN or infinity before they are averaged",
            "weights": "PROBLEM: after 10 steps 2 of 2 weights hold NaN or infinity",
        },
    ),
    "passes that have no end of their own": (
        "range(30)",
        "range(4)",
        {"steps": "ok: all ranks have taken 4 steps"},
    ),
}
INFINITE = """
class Infinite:
    def normal(self, size):
        return np.full(size, np.inf)
"""


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize("name", thorough_but(["the same data"], tuple(TAPE_FAULTS)))
def test_a_loop_of_tensorflow(tmp_path: Path, name: str) -> None:
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    old, new, expected = TAPE_FAULTS[name]
    assert not old or TAPE.count(old) == 1
    script = TAPE.replace(old, new) if old else TAPE
    if name == "not finite":
        script = script.replace("kv.init()\n", f"{INFINITE}\nkv.init()\n")
    checked = check(tmp_path, script)
    judge(checked, Case((), expected))
    found = checked.verdicts("ok")
    assert "with the gradients of all ranks" in found["optimizer"], checked.report
    if "steps" not in expected:
        assert found["steps"] == "all ranks have taken 10 steps", checked.report
    if name == "not finite":
        assert "rank 1: the gradient of Variable:0 (0) in step 4, first" in checked.report


LINEN = """
import flax.linen as nn
import jax
import numpy as np
import optax
import kolovod.jax as kv

kv.init()
random = np.random.default_rng(kv.rank())
model = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False), nn.Dense(1)])
made = kv.broadcast_pytree(model.init(jax.random.key(0), np.ones((2, 4), np.float32)))
params, running = made["params"], made["batch_stats"]
optimizer = kv.DistributedOptimizer(optax.adam(1e-2))
state = optimizer.init(params)

@jax.jit
def step(params, running, state, x):
    def loss_of(params):
        given = {"params": params, "batch_stats": running}
        out, new = model.apply(given, x, mutable=["batch_stats"])
        return ((out - 1) ** 2).mean(), new["batch_stats"]

    grads, running = jax.grad(loss_of, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), kv.allreduce_pytree(running), state

for i in range(30):
    x = random.normal(size=(8, 4)).astype(np.float32)
    params, running, state = step(params, running, state, x)
"""
NORMALIZED = "    nnx.Linear(4, 8, rngs=nnx.Rngs(kv.rank())), nnx.BatchNorm(8, rngs=nnx.Rngs(0)),"


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize("library", thorough_but(["nnx"], ("nnx", "linen")))
def test_running_statistics_of_jax(tmp_path: Path, library: str) -> None:
    pytest.importorskip("flax", reason="flax is not installed")
    if library == "nnx":
        script = NNX.replace("    nnx.Linear(4, 8, rngs=nnx.Rngs(kv.rank())),", NORMALIZED)
        averaged = f"{script}    state = nnx.state(model, nnx.BatchStat)\n"
        averaged += "    nnx.update(model, kv.allreduce_pytree(state))\n"
    else:
        averaged = LINEN
        script = LINEN.replace("kv.allreduce_pytree(running)", "running")
    assert script != averaged
    judge(checked := check(tmp_path, script), Case((), {"batch-norm": "hint: of its own data"}))
    assert "BatchNorm_0.mean differs" in checked.report or "layers_1.mean" in checked.report
    judge(check(tmp_path, averaged), Case((), {"batch-norm": "ok: are equal on all ranks"}))


@pytest.mark.slow
@pytest.mark.frameworks
@pytest.mark.parametrize("library", thorough_but(["flax"], ("flax", "equinox")))
def test_libraries_over_jax(tmp_path: Path, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    script = NNX if library == "flax" else EQUINOX
    good = check(tmp_path, script)
    judge(good, Case((), {}))
    found = good.verdicts("ok")
    assert {"initial-weights", "optimizer", "gradients", "weights", "data", "steps"} <= set(found)
    bad = check(tmp_path, script.replace("default_rng(kv.rank())", "default_rng(0)"))
    assert set(bad.verdicts("PROBLEM")) == {"data"}, bad.report


DDP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import kolovod.torch

dist.init_process_group("kolovod")
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(4, 1)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss.detach_())
    if dist.get_rank() == 0:
        print(f"loss {loss:.4f}")
"""
DDP_FAULTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "good": ("", "", {}),
    "gloo": ('"kolovod")', '"gloo")', {}),
    "its module is called": (
        "ddp(x)",
        "model(x)",
        {
            "optimizer": "PROBLEM: SGD steps with the gradients of its own rank only",
            "weights": "PROBLEM: an optimizer that is not wrapped has changed them",
        },
    ),
    "gradients changed": (
        "        optimizer.step()",
        "        model.weight.grad *= 1 + dist.get_rank()\n        optimizer.step()",
        {
            "gradients": "PROBLEM: in step 1 the gradients of module.weight differ between ranks",
            "weights": "PROBLEM: their gradients differed in the optimizer",
        },
    ),
    "post-local SGD": (
        "optimizer = ",
        "from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local\n"
        "alone = dist.new_subgroups(1)[0]\n"
        "state = post_local.PostLocalSGDState(None, alone, start_localSGD_iter=3)\n"
        "ddp.register_comm_hook(state, post_local.post_localSGD_hook)\n"
        "optimizer = ",
        {
            "optimizer": "PROBLEM: from step 3 on DDP's hook for post-local SGD averages",
            "weights": "PROBLEM: DDP's hook for post-local SGD lets ranks train apart",
        },
    ),
    "not finite": (
        "        loss.backward()",
        "        (loss / (dist.get_rank() == 0 or i != 3)).backward()",
        {
            "gradients": "PROBLEM: gradients hold NaN or infinity before they are averaged",
            "weights": "PROBLEM: after 10 steps 2 of 2 weights hold NaN or infinity",
        },
    ),
}
AVERAGED = """optimizer.step()
        if not epoch and not i:
            from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
            averager = PeriodicModelAverager(period=4, warmup_steps=3)
        averager.average_parameters(ddp.parameters())"""


@pytest.mark.slow
@pytest.mark.parametrize("name", thorough_but(["good", "gradients changed"], tuple(DDP_FAULTS)))
def test_ddp(tmp_path: Path, name: str) -> None:
    old, new, expected = DDP_FAULTS[name]
    assert not old or DDP.count(old) == 1
    checked = check(tmp_path, DDP.replace(old, new) if old else DDP)
    judge(checked, Case((), expected))
    assert "kolovod.torch" not in checked.report
    assert "the script combines values of ranks: allreduce" in checked.verdicts("ok")["metrics"]
    if "optimizer" not in expected:
        assert "combined by DistributedDataParallel" in checked.verdicts("ok")["optimizer"]
    if name == "not finite":
        assert "rank 1: the gradient of module.bias in step 4, first" in checked.report
    if name == "post-local SGD":
        script = DDP.replace(old, new).replace("optimizer.step()", AVERAGED)
        averaged = check(tmp_path, script)
        judge(averaged, Case((), {"weights": "cannot tell: PeriodicModelAverager lets ranks"}))
        assert "by PyTorch's PeriodicModelAverager" in averaged.verdicts("ok")["optimizer"]


LIGHTNING = """
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
import kolovod.torch.lightning

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer):
        self.net.weight.grad *= SCALE

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
trainer = lightning.Trainer(
    accelerator="cpu", strategy="kolovod", max_epochs=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
SCALE = 1
trainer.fit(Net(), DataLoader(data, batch_size=4, shuffle=True))
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.distributed.init_process_group("kolovod")
accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
model = torch.nn.Linear(4, 1)
optimizer, loader = accelerator.prepare(
    torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4, shuffle=True)
)
model = accelerator.prepare(model)
for epoch in range(3):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.frameworks
def test_lightning(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    good = check(tmp_path, LIGHTNING)
    judge(good, Case((), {}))
    assert "combined by DistributedDataParallel" in good.verdicts("ok")["optimizer"], good.report
    bad = check(tmp_path, LIGHTNING.replace("SCALE = 1", "SCALE = 1 + trainer.global_rank"))
    assert set(bad.verdicts("PROBLEM")) == {"gradients", "weights"}, bad.report
    shared = LIGHTNING.replace("max_epochs", "use_distributed_sampler=False, max_epochs")
    same = check(tmp_path, shared.replace("shuffle=True", "shuffle=False"))
    assert set(same.verdicts("PROBLEM")) == {"data"}, same.report
    assert "Trainer(use_distributed_sampler=True)" in " ".join(same.report.split())


@pytest.mark.slow
@pytest.mark.frameworks
def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed")
    good = check(tmp_path, ACCELERATE)
    judge(good, Case((), {}))
    assert "combined by DistributedDataParallel" in good.verdicts("ok")["optimizer"], good.report
    bad = check(tmp_path, ACCELERATE.replace("model = accelerator.prepare(model)\n", ""))
    assert set(bad.verdicts("PROBLEM")) == {"optimizer", "weights"}, bad.report
    assert "accelerator.prepare(model, optimizer, loader)" in " ".join(bad.report.split())
