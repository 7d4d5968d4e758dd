"""Lightning 2, DDPStrategy over the backend that is named; it starts the other rank itself.

python lightning_ddp.py kolovod FOLDER
"""

import sys

import lightning
import numpy
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

backend, folder = sys.argv[1:]


class Images(torch.utils.data.Dataset):
    """Squares of noise with a bright row, or column, of which the number is the class."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 1, 8, 8, generator=draw)
        self.labels = torch.randint(16, (count,), generator=draw)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            where = image[0, label] if label < 8 else image[0, :, label - 8]
            where += 1.5

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class Convolutions(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(1024, 16),
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        outputs = self.net(batch[0])
        self.log("loss", torch.nn.functional.cross_entropy(outputs, batch[1]), sync_dist=True)

    def test_step(self, batch: list[torch.Tensor], index: int) -> None:
        hits = self.all_gather(self.net(batch[0]).argmax(1) == batch[1])
        self.log("accuracy", hits.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    lightning.seed_everything(2)
    model = Convolutions()
    best = ModelCheckpoint(dirpath=f"{folder}/checkpoints", monitor="loss")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=3,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    load = torch.utils.data.DataLoader
    held = load(Images(128, 2), batch_size=16)
    trainer.fit(model, load(Images(512, 1), batch_size=16, shuffle=True), held)
    found = {"loss": trainer.callback_metrics["loss"].item()}
    found |= trainer.test(model, held, ckpt_path="best", verbose=False)[0]
    state = model.state_dict()
    numpy.savez(
        f"{folder}/rank{trainer.global_rank}.npz",
        backend=torch.distributed.get_backend(),
        size=trainer.world_size,
        **found,
        **{f"weights.{name}": value.numpy() for name, value in state.items()},
    )


if __name__ == "__main__":
    main()
