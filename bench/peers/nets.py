"""The networks of ../nets.h: the same layers, shapes and number of parameters."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5)
        self.fc1, self.fc2 = nn.Linear(320, 50), nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)
        return self.fc2(F.relu(self.fc1(x)))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [784, 4096, 4096, 1320, 10]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class ResidualBlock(nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.shortcut(x))


def resnet18():
    layers, channels = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()], 64
    for width in (64, 128, 256, 512):
        layers += [ResidualBlock(channels, width, 1 if width == 64 else 2), ResidualBlock(width, width, 1)]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def transformer(blocks=8):
    return nn.Sequential(*(nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0) for _ in range(blocks)))


class Workload:
    """What a rank trains: the net, the samples of each rank and step, and random samples with their classes."""

    def __init__(self, name, device="cpu"):
        nets = {"small": Small, "wide": Wide, "resnet18": resnet18, "transformer": transformer}
        self.net = nets[name]().to(device)
        self.batch = {"resnet18": 8, "transformer": 4}.get(name, 64)
        self.along = 1 if name == "transformer" else 0  # the dimension of x that counts samples
        if name == "transformer":
            self.x, self.y = torch.randn(64, 128, 512).to(device), None  # the loss is the mean square
        else:
            shape = (512, 3, 32, 32) if name == "resnet18" else (8192, 1, 28, 28)
            self.x, self.y = torch.rand(shape).to(device), torch.randint(10, shape[:1]).to(device)

    def samples(self):
        return self.x.size(self.along)

    def loss(self, model, first, count):
        """The loss of a part of the samples."""
        output = model(self.x.narrow(self.along, first, count))
        return output.square().mean() if self.y is None else F.cross_entropy(output, self.y[first : first + count])
