"""``torch.distributed.checkpoint``: saved by one number of ranks, gone on from by another one.

    kolovod run -np 2 -- python examples/integrations/torch_checkpoint.py checkpoint
    kolovod run -np 3 -- python examples/integrations/torch_checkpoint.py checkpoint

The model and its optimizer are sharded by FSDP2. Each rank writes its own shards, and reads what
its shards in the new world are. The batches are the same for any number of ranks.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

STEPS = 6  # in each job

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "checkpoint")
dist.init_process_group("kolovod")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 18), torch.nn.Tanh(), torch.nn.Linear(18, 1))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=dist.init_device_mesh("cpu", (size,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

first = 0
if saved := sorted(folder.glob("step-*")):
    # Places for what is read. Where no step was made it makes an empty one: not before training.
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    first = state["step"]
last = first + STEPS

for step in range(first, last):
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))[rank::size]
    loss = functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

weights, moments = get_state_dict(model, optimizer)
dcp.save(
    {"model": weights, "optimizer": moments, "step": last},
    checkpoint_id=folder / f"step-{last:06d}",
)
total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
print(f"rank {rank} of {size}: steps {first} to {last}, sum of weights {total:.6f}")
dist.destroy_process_group()
