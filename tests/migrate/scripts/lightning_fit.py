import lightning
import torch


class Model(lightning.LightningModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.Trainer(max_epochs=2).fit(Model())
