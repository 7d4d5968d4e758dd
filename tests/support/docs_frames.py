"""What the documentation's fragments take for granted: what comes before each, and after it.

A block that is a whole script needs none. Keys: page and number of the block.
"""

from __future__ import annotations

__all__ = ["FRAMES"]

_TORCH = """
import torch

import kolovod.torch as kv
from kolovod import elastic

kv.init()
model = torch.nn.Linear(10, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = kv.DistributedOptimizer(optimizer, model.named_parameters())
"""
_KERAS = """
import keras
import numpy as np

import kolovod.keras as kv
from kolovod import elastic

kv.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(kv.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
epochs, steps = 2, 3
x, y = np.ones((24, 4), np.float32), np.ones((24, 1), np.float32)
"""
_JAX = """
import jax.numpy as jnp
import optax

import kolovod.jax as kv

kv.init()
params = {"w": jnp.ones((4, 2))}
def loss_of(params, batch):
    return jnp.square(batch @ params["w"]).mean()
"""
_HOROVOD = """
import torch

class Steps:
    def __init__(self):
        import horovod.torch as hvd
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
steps = Steps()
model, optimizer, batches = steps.model, steps.optimizer, 20
"""

FRAMES: dict[str, tuple[str, str]] = {
    "elastic-reference-0": (
        _KERAS + "def batches():\n    while True:\n        yield x[:4], y[:4]\n",
        "train(state)\nassert state.epoch == epochs\n",
    ),
    "elastic-reference-1": (
        _KERAS + "sampler = elastic.ElasticSampler(range(24), batch_size=4)\n",
        "train(state)\nassert sampler.epoch == epochs - 1\n",
    ),
    "elastic-reference-2": (
        _TORCH,
        """
@elastic.run
def train(state):
    while state.step < 5:
        optimizer.zero_grad()
        model(torch.randn(32, 10)).square().mean().backward()
        optimizer.step()
        elastic.exactly(lambda: pair.included() and kv.allreduce(torch.ones(2), process_set=pair))
        state.step += 1
        state.commit()


train(state)
assert pair.size() == 2
""",
    ),
    "elastic-reference-5": (
        _TORCH + "state = elastic.State(model=model, optimizer=optimizer, step=0)\n",
        "train(state)\n",
    ),
    "elastic-reference-6": (_HOROVOD, "assert state.batch == batches - 1\n"),
    "elastic-reference-7": (
        _TORCH
        + """
import copy
import numpy as np

fresh_model = copy.deepcopy(model)
fresh_optimizer = torch.optim.SGD(fresh_model.parameters(), lr=0.01)
kv.broadcast_parameters(fresh_model.state_dict(), root_rank=0)
names = [name for name, _ in model.named_parameters()]
def batch_of(step, member):
    return torch.from_numpy(np.random.default_rng([step, member]).normal(size=(8, 10))).float()
def backward(model, batch):
    loss = model(batch).square().mean()
    loss.backward()
    return loss
def compute(step, member):
    fresh_model.zero_grad()
    backward(fresh_model, batch_of(step, member))
    return {name: p.grad.clone() for name, p in fresh_model.named_parameters()}
def apply(gradients):
    for name, p in fresh_model.named_parameters():
        p.grad = torch.as_tensor(gradients[name])
    fresh_optimizer.step()
""",
        "",
    ),
    "elastic-data-0": (
        "import torch\n"
        + _TORCH
        + """
dataset = torch.utils.data.TensorDataset(torch.randn(100, 10), torch.randn(100, 1))
loss = torch.nn.functional.mse_loss
""",
        "train(state)\nassert state.epoch == 9\n",
    ),
    "elastic-data-1": (
        "from kolovod import elastic\n",
        "assert (passes, batch_size) == (3, 29)\n",
    ),
    "elastic-data-2": (
        "import glob, json, os, tempfile\nimport torch\n"
        + _TORCH
        + """
loss = torch.nn.functional.mse_loss
os.makedirs("data", exist_ok=True)
for number in range(5):  # each rank writes the same
    with tempfile.NamedTemporaryFile("w", dir=".", delete=False) as file:
        for k in range(40 * number):
            print(json.dumps({"x": [float(k)] * 10, "y": [0.0]}), file=file)
    os.replace(file.name, f"data/{number}.jsonl")
""",
        "train(state)\nassert stream.samples_done == 40 + 80 + 120 + 160\n",
    ),
    "elastic-data-3": (
        "from kolovod import elastic\nfiles, read = [3, 5], range\n",
        "assert sorted(map(len, make(0, 1, 0))) == [8]\n",
    ),
    "jax-0": (
        _JAX,
        "updates, state = optimizer.update({'w': jnp.ones((4, 2))}, state, params)\n",
    ),
    "late-ranks-0": (
        """
import json, os, sys, tempfile

lines = [
    {"who": "rank 0 of 2 on host a", "bucket": None},
    {"name": "a", "bucket": 3, "state": "done", "ended_at_s": 1.0},
    {"name": "b", "bucket": None, "state": "submitted", "ended_at_s": None},
]
with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as file:
    file.write("\\n".join(map(json.dumps, lines)))
sys.argv[1:] = [file.name]
""",
        "os.unlink(file.name)\n",
    ),
    "slurm-0": (
        _TORCH + "state = elastic.State(model=model, optimizer=optimizer, step=7)\n",
        """
import os
state.has_left(kv.rank())
kv.barrier()
assert os.path.exists("step-7.pt")
assert torch.load("step-7.pt")[0] == 7
""",
    ),
    "torch-distributed-0": (
        "import torch\nimport kolovod.torch\n",
        "value = torch.ones(2)\ntorch.distributed.all_reduce(value)\nassert value[0] == 2\n",
    ),
    "torch-distributed-2": (
        """
import torch
import torch.distributed as dist

import kolovod.torch
from kolovod import elastic

dist.init_process_group("kolovod")
loss = torch.ones(1)
""",
        "assert mean == 1\n",
    ),
    "evaluation-0": ("", "assert since == 2 and means['accuracy'] > 0.9\n"),
    "evaluation-1": ("", "assert len(model.history.epoch) < 50\n"),
    "not-finite-1": (
        "",
        "assert left_out == 1 and all(p.isfinite().all() for p in model.parameters())\n",
    ),
    "not-finite-2": ("", "assert int(model.optimizer.iterations) == 3\n"),
    # Without TF_CONFIG a world of one worker, on each rank.
    "from-mirrored-0": (
        """
import os, tempfile

os.environ["TF_USE_LEGACY_KERAS"] = "1"
os.chdir(tempfile.mkdtemp(dir="."))
""",
        "assert model.evaluate(x, y, verbose=0) < 0.1\n",
    ),
    "from-mirrored-1": (
        "",
        "losses = history.history['loss']\nassert losses[-1] < min(0.2, losses[0] / 10), losses\n",
    ),
    "gpu-0": ("import torch\n", "assert torch.ones(1, device='cuda') == 1\n"),
    "mxnet-0": (
        """
import mxnet as mx
net = mx.gluon.nn.Dense(1, in_units=4)
net.initialize()
dataset = mx.gluon.data.SimpleDataset(list(range(8)))
""",
        "assert len(mine) == 4\n",
    ),
}
