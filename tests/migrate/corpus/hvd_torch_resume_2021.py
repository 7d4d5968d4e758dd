import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod.torch as hvd

hvd.init()
torch.manual_seed(0)
checkpoint_format = "checkpoint-{epoch}.pth.tar"
batches_per_allreduce, base_lr, warmup_epochs, epochs = 2, 0.02, 2, 8

x = torch.randn(1600, 8)
y = x[:, :3].argmax(1)
train_dataset = TensorDataset(x[:1200], y[:1200])
train_sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
train_loader = DataLoader(train_dataset, batch_size=10 * batches_per_allreduce, sampler=train_sampler)

resume_from_epoch = 0
for try_epoch in range(epochs, 0, -1):
    if os.path.exists(checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=base_lr * batches_per_allreduce * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16,
    backward_passes_per_step=batches_per_allreduce, op=hvd.Average)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Metric:
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, val):
        self.sum += hvd.allreduce(val.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch_idx):
    if epoch < warmup_epochs:
        progress = epoch + float(batch_idx + 1) / len(train_loader)
        lr_adj = 1.0 / hvd.size() * (progress * (hvd.size() - 1) / warmup_epochs + 1)
    else:
        lr_adj = 1.0 if epoch < 6 else 1e-1
    for param_group in optimizer.param_groups:
        param_group["lr"] = base_lr * hvd.size() * batches_per_allreduce * lr_adj


for epoch in range(resume_from_epoch, epochs):
    model.train()
    train_sampler.set_epoch(epoch)
    train_loss = Metric("train_loss")
    for batch_idx, (data, target) in enumerate(train_loader):
        adjust_learning_rate(epoch, batch_idx)
        optimizer.zero_grad()
        for i in range(0, len(data), 10):
            output = model(data[i:i + 10])
            loss = F.cross_entropy(output, target[i:i + 10])
            train_loss.update(loss)
            loss.div_(batches_per_allreduce)
            loss.backward()
        optimizer.step()
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                   checkpoint_format.format(epoch=epoch + 1))
        print("epoch", epoch, "loss", train_loss.avg.item())
accuracy = (model(x[1200:]).argmax(1) == y[1200:]).float().mean()
accuracy = hvd.allreduce(accuracy, name="accuracy")
if hvd.rank() == 0:
    print(f"accuracy {accuracy.item():.3f}")
