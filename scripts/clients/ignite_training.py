"""PyTorch-Ignite's ``idist`` with the backend that is named: its verbs, a training, its metrics.

    python ignite_training.py horovod FOLDER

Ignite starts the two ranks itself.
"""

import sys
from typing import Any

import ignite.distributed as idist
import numpy
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Accuracy, ConfusionMatrix, Loss, RunningAverage


def verbs(rank: int) -> dict[str, Any]:
    """Call each verb once, with values that depend on the rank."""
    mine = torch.arange(1.0, 5.0) * (rank + 1)
    found = {
        f"verb.{op.lower()}": idist.all_reduce(mine.clone(), op)
        for op in ("SUM", "MIN", "MAX", "PRODUCT")
    }
    found["verb.number"] = idist.all_reduce(rank + 0.5)
    found["verb.gathered"] = idist.all_gather(mine)
    parts = idist.all_gather_tensors_with_shapes(
        torch.full((rank + 1, 2), float(rank)), [[1, 2], [2, 2]]
    )
    found["verb.shapes"] = torch.cat(parts)
    found["verb.broadcast"] = idist.broadcast(mine.clone(), src=1)
    group = idist.new_group([1])  # who is not in it keeps what it has
    found["rank.group"] = idist.all_gather(mine, group)
    assert idist.all_gather(f"rank {rank}") == ["rank 0", "rank 1"]
    assert idist.broadcast(f"rank {rank}", src=1) == "rank 1"
    idist.barrier()
    return {name: numpy.asarray(value) for name, value in found.items()}


def train(local_rank: int, folder: str) -> None:
    rank, backend = idist.get_rank(), idist.backend()
    found = verbs(rank)
    torch.manual_seed(11)
    inputs = torch.randn(320, 12)
    labels = (inputs @ torch.randn(12, 4)).argmax(1)
    data = torch.utils.data.TensorDataset(inputs, labels)
    torch.manual_seed(rank)  # the ranks start with different weights: rank 0's count
    net = torch.nn.Sequential(torch.nn.Linear(12, 48), torch.nn.ReLU(), torch.nn.Linear(48, 4))
    model = idist.auto_model(net)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = idist.auto_dataloader(data, batch_size=32, shuffle=True)
    criterion = torch.nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "running")
    metrics = {
        "accuracy": Accuracy(),
        "loss": Loss(criterion),
        "confusion": ConfusionMatrix(4),
    }
    evaluator = create_supervised_evaluator(model, metrics=metrics)
    saver = DiskSaver(f"{folder}/checkpoints", create_dir=True, require_empty=False)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": net}, saver))

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle_again(engine: Any) -> None:
        loader.sampler.set_epoch(engine.state.epoch)

    trainer.run(loader, max_epochs=4)
    evaluator.run(loader)
    found |= {name: numpy.asarray(evaluator.state.metrics[name]) for name in metrics}
    found["running"] = numpy.asarray(trainer.state.metrics["running"])
    weights = {f"weights.{name}": value.numpy() for name, value in net.state_dict().items()}
    size = idist.get_world_size()
    numpy.savez(f"{folder}/rank{rank}.npz", backend=backend, size=size, **found, **weights)


if __name__ == "__main__":
    with idist.Parallel(backend=sys.argv[1], nproc_per_node=2) as parallel:
        parallel.run(train, sys.argv[2])
