"""Hugging Face Accelerate: a training loop with accumulated and clipped gradients.

    kolovod run -np 2 -- python examples/integrations/accelerate_loop.py

Needs ``pip install 'kolovod[integrations]'``. Accelerate uses the process group that is there.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.distributed.init_process_group("kolovod")  # before Accelerator, which takes it over
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
set_seed(1)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
trained, held_out = torch.utils.data.random_split(data, [1437, 360])
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader, test_loader = accelerator.prepare(
    model, optimizer, DataLoader(trained, batch_size=16, shuffle=True), DataLoader(held_out, 50)
)

for _ in range(3):
    for batch, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(functional.cross_entropy(model(batch), targets))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

hits = []
with torch.no_grad():
    for batch, targets in test_loader:
        # Without the samples that filled up the last batch.
        guesses, truth = accelerator.gather_for_metrics((model(batch).argmax(1), targets))
        hits.append(guesses == truth)
found = torch.cat(hits)
weights = sum(parameter.double().sum().item() for parameter in model.parameters())
print(
    f"rank {accelerator.process_index} of {accelerator.num_processes}: accuracy "
    f"{found.float().mean().item():.3f} on {len(found)} images, sum of weights {weights:.12f}"
)
accelerator.end_training()
