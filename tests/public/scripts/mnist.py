"""In the style of PyTorch's MNIST example: an argparse of many flags, a training loop, no resume."""

import argparse
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR


class Digits(torch.utils.data.Dataset):
    """Digits that need no download: a bright row for each."""

    def __init__(self, size):
        self.targets = torch.arange(size) % 10
        self.data = torch.rand(size, 1, 10, 10, generator=torch.Generator().manual_seed(7))
        self.data[torch.arange(size), 0, self.targets] += 1.0

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        time.sleep(0.1 if os.path.exists("busy") else 0.01)  # as storage that others use, too
        return self.data[index], self.targets[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        return F.log_softmax(self.fc1(torch.flatten(self.dropout1(x), 1)), dim=1)


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done, size = batch_idx * len(data), len(train_loader.dataset)
            share = 100.0 * batch_idx / len(train_loader)
            print(f"Train Epoch: {epoch} [{done}/{size} ({share:.0f}%)]\tLoss: {loss.item():.6f}")


def test(model, data, target):
    model.eval()
    with torch.no_grad():
        output = model(data)
    correct = output.argmax(dim=1).eq(target).sum().item()
    loss = F.nll_loss(output, target).item()
    print(f"\nTest set: Average loss: {loss:.4f}, Accuracy: {correct}/{len(target)}\n")


def main():
    parser = argparse.ArgumentParser(description="PyTorch MNIST Example")
    parser.add_argument("--batch-size", type=int, default=4, metavar="N", help="input batch size (default: 4)")
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="number of epochs to train (default: 3)")
    parser.add_argument("--lr", type=float, default=1.0, metavar="LR", help="learning rate (default: 1.0)")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M", help="learning rate step (default: 0.7)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="random seed (default: 1)")
    parser.add_argument("--log-interval", type=int, default=1, metavar="N", help="batches between lines of output")
    parser.add_argument("--save-model", action="store_true", help="For Saving the current Model")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dataset = Digits(80)
    train_loader = torch.utils.data.DataLoader(dataset, batch_size=args.batch_size, shuffle=True)
    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, dataset.data, dataset.targets)
        scheduler.step()
    if args.save_model:
        torch.save(model.state_dict(), "mnist_cnn.pt")


if __name__ == "__main__":
    main()
