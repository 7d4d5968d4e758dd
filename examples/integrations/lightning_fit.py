"""Lightning: ``Trainer(strategy="kolovod")`` trains on all ranks, with validation.

    kolovod run -np 2 -- python examples/integrations/lightning_fit.py

Needs ``pip install 'kolovod[integrations]'``. The number of ranks is that of the job.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import kolovod.torch.lightning  # noqa: F401  # makes the strategy "kolovod" known


class Digits(lightning.LightningModule):
    """A classifier of 8x8 images."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        hits = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", hits, sync_dist=True)  # the mean over all ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
lightning.seed_everything(1, verbose=False)
trained, held_out = torch.utils.data.random_split(data, [1437, 360])
model = Digits()
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="kolovod",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(trained, batch_size=16, shuffle=True), DataLoader(held_out, 30))
weights = sum(parameter.double().sum().item() for parameter in model.parameters())
accuracy = trainer.callback_metrics["accuracy"].item()
print(
    f"rank {trainer.global_rank} of {trainer.world_size}: accuracy {accuracy:.3f}, "
    f"sum of weights {weights:.12f}"
)
