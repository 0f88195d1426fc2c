"""Models as people have them, and their training by ranks, which is compared to that of one process and to that over gloo.

Two ranks take a few steps. Their parameters must be equal to each other in every bit; and equal to those of one process that
takes the whole batch, to 1e-6 of the largest one, or in every bit to those of the same ranks over gloo: two numbers have one
sum, so two backends differ in nothing. MUSTER_TEST_FULL takes more steps.
"""
from __future__ import annotations

import os
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from ranks import run

RANKS = 2
STEPS = 20 if "MUSTER_TEST_FULL" in os.environ else 3
VOCABULARY = 300

Batch = tuple[torch.Tensor, torch.Tensor]
Parameters = list[torch.Tensor]


# -------------------------------------------------------------------------------------------------------------- models


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second_norm(self.second(self.first_norm(self.first(x)).relu()))
        return (y + self.shortcut(x)).relu()


def resnet18() -> nn.Module:
    """The layers and the 11,689,512 parameters of torchvision's."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for outputs in (64, 128, 256, 512):
        layers += [Block(inputs, outputs, 1 if outputs == 64 else 2), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class Transformer(nn.Module):
    """The output's weight is the embedding's: its gradient has two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.positions = nn.Parameter(torch.randn(16, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, VOCABULARY)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(x) + self.positions)).transpose(1, 2)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0]).transpose(1, 2)


def wide_convolutions() -> nn.Module:
    """Two weights of 2.25 MiB, which exceed the first bucket, and one of 4.5 MiB."""
    return nn.Sequential(nn.Conv2d(3, 256, 3), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.ReLU(), nn.Conv2d(256, 256, 3), nn.ReLU(),
                         nn.Conv2d(256, 512, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 80), nn.Tanh(), nn.Linear(80, 1000))


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def generator(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


def images(rank: int, step: int, size: int = 32) -> Batch:
    g = generator(rank, step)
    return torch.randn(2, 3, size, size, generator=g), torch.randint(1000, (2,), generator=g)


def words(rank: int, step: int) -> Batch:
    g = generator(rank, step)
    return torch.randint(VOCABULARY, (4, 16), generator=g), torch.randint(VOCABULARY, (4, 16), generator=g)


def vectors(rank: int, step: int) -> Batch:
    g = generator(rank, step)
    return torch.randn(6, 64, generator=g), torch.randint(1000, (6,), generator=g)


# ------------------------------------------------------------------------------------------------------------ training


def state(net: nn.Module) -> Parameters:
    """Parameters and buffers, the same for a model and its DDP."""
    return [tensor.detach().clone() for tensor in net.state_dict().values()]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def whole(batch: Callable[[int, int], Batch], step: int) -> Batch:
    parts = [batch(rank, step) for rank in range(RANKS)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def train(net: nn.Module, batches: Iterator[Batch], optimizer: torch.optim.Optimizer | None = None) -> Parameters:
    optimizer = optimizer or sgd(net)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    return state(net)


kept: list[dist.ProcessGroup] = []  # until the rank ends: a hook's callback may hold the last reference, in a thread that gloo joins


def on_both(train_over: Callable[[int, dist.ProcessGroup], Any]) -> list[tuple[Any, Any]]:
    """What train_over(rank, group) gave over muster and over gloo, of each rank."""
    def body(rank: int) -> tuple[Any, Any]:
        groups = dist.group.WORLD, dist.new_group(backend="gloo")
        assert [dist.get_backend(group) for group in groups] == ["muster", "gloo"]
        kept.extend(groups)
        return tuple(train_over(rank, group) for group in groups)

    return run(RANKS, body)


class Compared(unittest.TestCase):
    def assert_same_bits(self, ours: Any, theirs: Any) -> None:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)

    def assert_equals_gloo(self, train_over: Callable[[int, dist.ProcessGroup], Any]) -> Any:
        (zero, zero_gloo), (one, one_gloo) = on_both(train_over)
        self.assert_same_bits(zero, zero_gloo)
        self.assert_same_bits(one, one_gloo)
        return zero

    def assert_close(self, ours: Parameters, one_process: Parameters) -> None:
        largest = max(t.abs().max().item() for t in one_process if t.is_floating_point() and t.numel())
        torch.testing.assert_close(ours, one_process, rtol=0, atol=1e-6 * largest)

    def assert_equals_one_process(self, make: Callable[[], nn.Module], batch: Callable[[int, int], Batch],
                                  wrap: Callable[[nn.Module], nn.Module] = DistributedDataParallel, steps: int = STEPS) -> None:
        def body(rank: int) -> tuple[Parameters, Parameters | None, Parameters]:
            start = state(seeded(make))
            ours = train(wrap(seeded(make)), (batch(rank, step) for step in range(steps)))
            expected = train(seeded(make), (whole(batch, step) for step in range(steps))) if rank == 0 else None
            return ours, expected, start

        (zero, expected, start), (one, _, _) = run(RANKS, body)
        self.assert_same_bits(zero, one)
        self.assert_close(zero, expected)
        self.assertFalse(all(torch.equal(a, b) for a, b in zip(zero, start)), "nothing was trained")
