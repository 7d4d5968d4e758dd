"""One rank in bench/front_ends.py with PyTorch: ``python bench/torch_rank.py PEER``."""

from __future__ import annotations

import os
from typing import Any

import front_ends_rank
import torch
from front_ends_rank import BATCHES, LEARNING_RATE, MOMENTUM


class Layers(torch.nn.Module):
    """Layers with shortcuts, each width x width."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            torch.from_numpy(part) for pair in first for part in pair
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = iter(self.weights)
        for w, b in zip(parts, parts, strict=True):
            x = x + 0.1 * torch.tanh(x @ w + b)
        return x


class Alone(front_ends_rank.Alone):
    """No communication: each process trains by itself."""

    def wrapped(self, model: Layers) -> Any:
        return model

    def optimizer(self, model: Layers) -> Any:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


class Kolovod(Alone):
    """``DistributedOptimizer``, whose hooks send gradients while others are computed."""

    def __init__(self) -> None:
        import kolovod.torch as kv

        kv.init()
        self._kv, self.rank, self.size = kv, kv.rank(), kv.size()

    def optimizer(self, model: Layers) -> Any:
        named = model.named_parameters()
        return self._kv.DistributedOptimizer(super().optimizer(model), named_parameters=named)

    def close(self) -> None:
        self._kv.shutdown()


class Ddp(Alone):
    """``DistributedDataParallel`` over gloo."""

    def __init__(self) -> None:
        super().__init__()
        where = f"tcp://{os.environ['BENCH_COORDINATOR']}"
        torch.distributed.init_process_group(
            "gloo", init_method=where, rank=self.rank, world_size=self.size
        )

    def wrapped(self, model: Layers) -> Any:
        return torch.nn.parallel.DistributedDataParallel(model)

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Training:
    """See front_ends_rank.Training."""

    def __init__(self, peer: Any, model: str) -> None:
        torch.set_num_threads(1)  # whatever the launchers set
        layers = Layers(front_ends_rank.first_weights(model))
        self._params = list(layers.parameters())
        self._model, self._optimizer = peer.wrapped(layers), peer.optimizer(layers)
        own = front_ends_rank.batches(model, peer.rank)
        self._batches = [(torch.from_numpy(x), torch.from_numpy(labels)) for x, labels in own]
        self._count = 0

    def step(self) -> None:
        x, labels = self._batches[self._count % BATCHES]
        self._count += 1
        self._optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self._model(x), labels).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def weights(self) -> list[Any]:
        return [param.detach().numpy() for param in self._params]


if __name__ == "__main__":
    front_ends_rank.serve({"kolovod": Kolovod, "alone": Alone, "own": Ddp}, Training)
