"""Lightning 1.5 and 1.9: ``Trainer(strategy="horovod")`` by horovodrun, or its DDP over gloo.

    horovodrun -np 2 python lightning_horovod.py horovod FOLDER 1
    python lightning_horovod.py ddp FOLDER 1

The last argument says of how many batches gradients are added up before a step.
"""

import sys

import horovod.torch  # noqa: F401 - first, since Lightning 1.5.10 finds what is imported already

# isort: split
import numpy
import pytorch_lightning
import torch

strategy, folder, passes = sys.argv[1:]


class Classifier(pytorch_lightning.LightningModule):
    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.net = torch.nn.Sequential(
            torch.nn.Linear(20, 64),
            torch.nn.LayerNorm(64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 3),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("training_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        outputs = self(batch[0])
        self.log("loss", torch.nn.functional.cross_entropy(outputs, batch[1]), sync_dist=True)
        hits = (outputs.argmax(1) == batch[1]).float().mean()
        self.log("accuracy", hits, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def load(data: torch.utils.data.Dataset, shuffle: bool) -> torch.utils.data.DataLoader:
    # Lightning 1.9 shuffles by this generator, and 1.5 by one of its own. Without it 1.9 takes
    # torch's, which only its DDP seeds again.
    generator = torch.Generator().manual_seed(2)
    return torch.utils.data.DataLoader(data, batch_size=16, shuffle=shuffle, generator=generator)


pytorch_lightning.seed_everything(1)
inputs = torch.randn(512, 20)
labels = (inputs @ torch.randn(20, 3)).argmax(1)
data = torch.utils.data.TensorDataset(inputs, labels)
# The strategy multiplies the rate by the number of ranks; DDP leaves it alone.
model = Classifier(0.01 if strategy == "horovod" else 0.02)
devices = {} if strategy == "horovod" else {"num_processes": 2}
trainer = pytorch_lightning.Trainer(
    strategy=strategy,
    accelerator="cpu",
    max_epochs=3,
    gradient_clip_val=1.0,
    accumulate_grad_batches=int(passes),
    default_root_dir=folder,
    logger=False,
    enable_progress_bar=False,
    **devices,
)
trainer.fit(model, load(data, True), load(data, False))
backend = "horovod" if strategy == "horovod" else torch.distributed.get_backend()
# Lightning 1.9 heeds sync_dist only where torch.distributed is initialized, so not with Horovod.
plugin = getattr(trainer, "strategy", None) or trainer.training_type_plugin  # in 1.5
names = ("loss", "accuracy")
metrics = {name: plugin.reduce(trainer.callback_metrics[name]).item() for name in names}
weights = {f"weights.{name}": value.numpy() for name, value in model.state_dict().items()}
numpy.savez(
    f"{folder}/rank{trainer.global_rank}.npz",
    backend=backend,
    size=trainer.world_size,
    **metrics,
    **weights,
)
