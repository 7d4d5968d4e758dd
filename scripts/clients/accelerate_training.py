"""Hugging Face Accelerate, over the backend that is named.

    torchrun --nproc-per-node 2 accelerate_training.py kolovod FOLDER

Accumulates, clips, saves its state in the middle and goes on from there, and gathers for metrics.
"""

import sys

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed

backend, folder = sys.argv[1:]
torch.distributed.init_process_group(backend)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 64),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(64, 4),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
inputs = torch.randn(250, 16)  # the last batches are incomplete
labels = (inputs @ torch.randn(16, 4)).argmax(1)
data = torch.utils.data.TensorDataset(inputs, labels)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)


def train() -> None:
    """Train one epoch."""
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


train()
accelerator.save_state(f"{folder}/state")
train()
accelerator.load_state(f"{folder}/state")
train()

model.eval()
hits = []
with torch.no_grad():
    for x, y in loader:
        guesses, truth = accelerator.gather_for_metrics((model(x).argmax(1), y))
        hits += (guesses == truth).tolist()
chosen = [f"by rank {accelerator.process_index}"]
broadcast_object_list(chosen)
assert chosen == ["by rank 0"], chosen
assert gather_object([accelerator.process_index]) == [0, 1]
assert len(hits) == 250, len(hits)

state = accelerator.unwrap_model(model).state_dict()
numpy.savez(
    f"{folder}/rank{accelerator.process_index}.npz",
    backend=torch.distributed.get_backend(),
    size=accelerator.num_processes,
    accuracy=numpy.mean(hits),
    **{f"weights.{name}": value.numpy() for name, value in state.items()},
)
accelerator.end_training()
