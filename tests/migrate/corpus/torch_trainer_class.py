import logging
from dataclasses import dataclass, field

import torch
from torch.utils.data import DataLoader, TensorDataset

log = logging.getLogger("trainer")


@dataclass
class Config:
    lr: float = 0.02
    epochs: int = 12
    batch_size: int = 20
    hidden: list = field(default_factory=lambda: [24, 24])


class MLP(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        layers = []
        for a, b in zip(sizes[:-1], sizes[1:]):
            layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*layers[:-1])

    def forward(self, x):
        return self.net(x)


class Trainer:
    def __init__(self, model, config, train_data, test_data):
        self.model = model
        self.config = config
        self.train_loader = DataLoader(train_data, batch_size=config.batch_size, shuffle=True)
        self.test_loader = DataLoader(test_data, batch_size=100)
        self.optimizer = self.configure_optimizer()
        self.criterion = torch.nn.CrossEntropyLoss()
        self.epoch = 0

    def configure_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.config.lr, momentum=0.9)

    def step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def fit(self):
        for self.epoch in range(self.config.epochs):
            self.model.train()
            losses = [self.step(batch) for batch in self.train_loader]
            log.info("epoch %d loss %.4f", self.epoch, sum(losses) / len(losses))
            self.on_epoch_end()

    def on_epoch_end(self):
        accuracy = self.validate()
        print(f"accuracy {accuracy:.3f}")

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        hits = [(self.model(x).argmax(-1) == y).float() for x, y in self.test_loader]
        return torch.cat(hits).mean().item()


def main():
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    x = torch.randn(1500, 2)
    y = (x[:, 0] * x[:, 1] > 0).long()
    config = Config()
    model = MLP([2, *config.hidden, 2])
    Trainer(model, config, TensorDataset(x[:1000], y[:1000]), TensorDataset(x[1000:], y[1000:])).fit()


if __name__ == "__main__":
    main()
