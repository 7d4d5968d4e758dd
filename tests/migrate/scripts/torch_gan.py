from itertools import chain

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    generator = nn.Linear(4, 8)
    critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    embedding, head = nn.Linear(8, 2), nn.Linear(2, 1)
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_e = torch.optim.SGD(chain(embedding.parameters(), head.parameters()), lr=0.01)
    dataset = TensorDataset(torch.linspace(-1, 1, 2048).reshape(256, 8))
    loss_of = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        for (real,) in DataLoader(dataset, batch_size=32, shuffle=True, drop_last=True):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = generator(torch.randn(len(real), 4))
            opt_d.zero_grad()
            loss_d = loss_of(critic(real), ones) + loss_of(critic(fake.detach()), zeros)
            loss_d.backward()
            opt_d.step()
            opt_g.zero_grad()
            loss_g = loss_of(critic(fake), ones)
            loss_g.backward()
            opt_g.step()
            opt_e.zero_grad()
            head(embedding(real)).square().mean().backward()
            opt_e.step()
        print(epoch, loss_d.item(), loss_g.item())
        torch.save(generator.state_dict(), "generator.pt")
        torch.save(critic.state_dict(), "critic.pt")


main()
