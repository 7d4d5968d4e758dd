"""WebDataset: samples in tar files, of which each rank reads its own.

    kolovod run -np 2 -- python examples/integrations/tar_shards.py

Needs ``pip install 'kolovod[integrations]'``. Ranks may have unequally many samples: one that has
none left joins, and gets the weights of the last one when the epoch is over.
"""

import tempfile
from pathlib import Path

import torch
import webdataset
from sklearn.datasets import load_digits
from torch.nn import functional

import kolovod.torch as kv
from kolovod.data import shard

SHARDS = 5

kv.init()
folder = tempfile.TemporaryDirectory()  # each rank makes all shards: no folder is shared here
pattern = Path(folder.name) / "digits-%d.tar"
images, labels = load_digits(return_X_y=True)
with webdataset.ShardWriter(str(pattern), maxcount=-(-len(labels) // SHARDS), verbose=0) as writer:
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        image = image.astype("float32") / 16
        writer.write({"__key__": f"{index:06d}", "image.npy": image, "label.cls": int(label)})

urls = [str(pattern) % number for number in range(SHARDS)]
data = webdataset.WebDataset(urls, nodesplitter=shard, shardshuffle=SHARDS, seed=1)
data = data.shuffle(500, seed=1).decode().to_tuple("image.npy", "label.cls").batched(32)

torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
optimizer = kv.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
kv.broadcast_parameters(net.state_dict())
for epoch in range(3):
    count, right = 0, 0
    for batch, targets in data:
        inputs, targets = torch.as_tensor(batch), torch.as_tensor(targets)
        optimizer.zero_grad()
        outputs = net(inputs)
        functional.cross_entropy(outputs, targets).backward()
        optimizer.step()
        count += len(targets)
        right += int((outputs.argmax(1) == targets).sum())
    last = kv.join()
    kv.broadcast_parameters(net.state_dict(), root_rank=last)
    accuracy = right / count
    weights = sum(parameter.double().sum().item() for parameter in net.parameters())
    print(f"rank {kv.rank()} of {kv.size()}, epoch {epoch}: {count} samples, accuracy "
          f"{accuracy:.3f}, sum of weights {weights:.12f}")  # fmt: skip
folder.cleanup()
