"""PyTorch's DataLoader with worker processes, which stay from epoch to epoch.

    kolovod run -np 2 -- python examples/integrations/dataloader_workers.py [fork|spawn]

Workers only load: the rank that has started them trains, and they end with it.
"""

import sys

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, get_worker_info

import kolovod.torch as kv
from kolovod.data import ShardedSampler


class Sums(Dataset[tuple[torch.Tensor, torch.Tensor, int, int]]):
    """Made when it is asked for: inputs, their sum, the index, and the worker that made it."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        inputs = torch.randn(8, generator=torch.Generator().manual_seed(index))
        worker = get_worker_info()
        return inputs, inputs.sum(0, keepdim=True), index, -1 if worker is None else worker.id


def main() -> None:  # a spawned worker imports this file
    kv.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = kv.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    data = Sums()
    sampler = ShardedSampler(data, seed=1)  # each rank's part
    method = (*sys.argv[1:], "fork")[0]
    kept = {"persistent_workers": True, "multiprocessing_context": method}
    loader = DataLoader(data, batch_size=10, sampler=sampler, num_workers=2, **kept)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen, workers = set(), set()
        for inputs, sums, indices, ids in loader:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(inputs), sums)
            loss.backward()
            optimizer.step()
            seen.update(indices.tolist())
            workers.update(ids.tolist())
        total = len(set().union(*kv.allgather_object(seen)))
        mean = kv.allreduce(loss.detach(), "loss").item()
        print(f"rank {kv.rank()} of {kv.size()}, epoch {epoch}: {len(seen)} of {total} samples "
              f"by workers {sorted(workers)}, loss {mean:.6f}")  # fmt: skip


if __name__ == "__main__":
    main()
