import logging
import sys

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    random_split,
)

logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s")
logger = logging.getLogger(__name__)


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def lr_lambda(current_step):
        if current_step < num_warmup_steps:
            return current_step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - current_step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, lr_lambda)


class Classifier(nn.Module):
    def __init__(self, vocab=50, dim=16):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim)
        self.out = nn.Linear(dim, 2)

    def forward(self, ids):
        return self.out(self.bag(ids))


torch.manual_seed(42)
ids = torch.randint(0, 50, (1600, 12))
labels = ((ids < 25).sum(1) > 6).long()
dataset = TensorDataset(ids, labels)
train_dataset, val_dataset = random_split(dataset, [1200, 400])
train_dataloader = DataLoader(train_dataset, sampler=RandomSampler(train_dataset), batch_size=24)
validation_dataloader = DataLoader(val_dataset, sampler=SequentialSampler(val_dataset), batch_size=24)

model = Classifier()
optimizer = AdamW(model.parameters(), lr=2e-2, eps=1e-8)
epochs = 5
total_steps = len(train_dataloader) * epochs
scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=20, num_training_steps=total_steps)
for epoch_i in range(epochs):
    total_train_loss = 0
    model.train()
    for step, batch in enumerate(train_dataloader):
        b_input_ids, b_labels = batch
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(b_input_ids), b_labels)
        total_train_loss += loss.item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    logger.info("Average training loss: %.2f", total_train_loss / len(train_dataloader))
    model.eval()
    hits = 0
    for b_input_ids, b_labels in validation_dataloader:
        with torch.no_grad():
            hits += (model(b_input_ids).argmax(1) == b_labels).sum().item()
    logger.info("accuracy %.3f", hits / len(val_dataset))
