import numpy as np
import torch
import torch.nn as nn
from torch.autograd import Variable

# sliding windows over a series, as in many notebooks
series = np.sin(np.arange(0, 120, 0.1)) * np.cos(np.arange(0, 120, 0.1) * 0.3)


def sliding_windows(data, seq_length):
    x, y = [], []
    for i in range(len(data) - seq_length - 1):
        x.append(data[i:(i + seq_length)])
        y.append(data[i + seq_length])
    return np.array(x), np.array(y)


x, y = sliding_windows(series, 8)
train_size = int(len(y) * 0.67)
trainX = Variable(torch.Tensor(x[:train_size])).unsqueeze(-1)
trainY = Variable(torch.Tensor(y[:train_size])).unsqueeze(-1)
testX = Variable(torch.Tensor(x[train_size:])).unsqueeze(-1)
testY = Variable(torch.Tensor(y[train_size:])).unsqueeze(-1)


class LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(input_size=1, hidden_size=8, batch_first=True)
        self.fc = nn.Linear(8, 1)

    def forward(self, x):
        _, (h_out, _) = self.lstm(x)
        return self.fc(h_out[-1])


lstm = LSTM()
criterion = torch.nn.MSELoss()
optimizer = torch.optim.Adam(lstm.parameters(), lr=0.03)
for epoch in range(60):
    outputs = lstm(trainX)
    optimizer.zero_grad()
    loss = criterion(outputs, trainY)
    loss.backward()
    optimizer.step()
    if epoch % 20 == 0:
        print("Epoch: %d, loss: %1.5f" % (epoch, loss.item()))
lstm.eval()
with torch.no_grad():
    print("accuracy", 1 - criterion(lstm(testX), testY).item() / testY.var().item())
