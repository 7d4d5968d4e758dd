import torch
import torch.utils.data as data
from torch.optim import Adam as TheAdam


class Trainer:
    def __init__(self, epochs):
        self.epochs = epochs
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
        self.optimizer = TheAdam(self.model.parameters())
        x = torch.linspace(-1, 1, 2048).reshape(256, 8)
        self.loader = data.DataLoader(data.TensorDataset(x, x.mean(1)), 32, True)

    def train_epoch(self):
        for inputs, labels in self.loader:
            loss = (self.model(inputs).squeeze(1) - labels).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return loss.item()

    def fit(self):
        best = float("inf")
        for epoch in range(self.epochs):
            loss = self.train_epoch()
            print(f"{epoch}: {loss}")
            if loss > best:
                break
            best = loss


if __name__ == "__main__":
    Trainer(2).fit()
