"""safetensors: rank 0 writes the weights; on loading it reads them, and all ranks get them.

    kolovod run -np 2 -- python examples/integrations/safetensors_weights.py

Needs ``pip install 'kolovod[integrations]'``.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

import kolovod.torch as kv


def build() -> torch.nn.Module:
    """A net with other random weights on each rank."""
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))


def save(model: torch.nn.Module, path: Path) -> None:
    """Weights are equal on all ranks: one writes. The others wait until the file is whole."""
    if kv.rank() == 0:
        save_file(model.state_dict(), path, metadata={"format": "pt"})
    kv.barrier()


def load(model: torch.nn.Module, path: Path) -> None:
    """Only rank 0 reads: the file need not be on the other hosts."""
    if kv.rank() == 0:
        model.load_state_dict(load_file(path))
    kv.broadcast_parameters(model.state_dict(), root_rank=0)


kv.init()
torch.manual_seed(kv.rank())
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
optimizer = kv.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
kv.broadcast_parameters(model.state_dict())
for _ in range(20):
    inputs = torch.randn(16, 8)
    loss = functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with tempfile.TemporaryDirectory() as folder:  # of this rank; on rank 0 the file is in it
    path = Path(folder) / "model.safetensors"
    save(model, path)
    loaded = build()
    load(loaded, path)
pairs = zip(model.parameters(), loaded.parameters(), strict=True)
equal = all(torch.equal(mine, read) for mine, read in pairs)
print(f"rank {kv.rank()} of {kv.size()}: loaded weights are the saved ones: {equal}")
