"""Trains the models of support/models.h by PyTorch's DistributedDataParallel, in two processes over Gloo. Per question:

    <model> <dtype> <way> <rate> <steps> <file>

The file has the values of parameters and buffers to begin with, by name; a file ".after" beside it gets rank 0's after
the steps. The answer has the losses of all steps of rank 0, and then those of rank 1.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import two_processes


def generator_of(rank, step):
    return torch.Generator().manual_seed(1000 * step + rank)


def drawn(rank, step, *sizes):
    return torch.randn(sizes, generator=generator_of(rank, step))


def words(rank, step, sizes, vocabulary):
    return torch.randint(vocabulary, sizes, generator=generator_of(rank, step))


# --- the models of support/models.h and resnet18.h, with the same names ---


def convolution(channels, out, size, stride):
    return nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)


class ResidualBlock(nn.Module):
    def __init__(self, channels, out, stride):
        super().__init__()
        self.first, self.second = convolution(channels, out, 3, stride), convolution(out, out, 3, 1)
        self.first_norm, self.second_norm = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.shortcut = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(convolution(channels, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(y + (self.shortcut(x) if self.shortcut else x))


class ResNet18(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [convolution(3, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        channels = 64
        for width in (64, 128, 256, 512):
            for is_first in (True, False):
                layers.append(ResidualBlock(channels, width, 2 if is_first and width > 64 else 1))
                channels = width
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))

    def forward(self, rank, step):
        return nn.functional.cross_entropy(self.layers(drawn(rank, step, 2, 3, 64, 64)), words(rank, step, (2,), 1000))


class WideConvolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(256, 512, 3, padding=1), nn.Conv2d(512, 256, 3, padding=1)

    def forward(self, rank, step):
        return self.second(torch.relu(self.first(drawn(rank, step, 2, 256, 6, 6)))).mean((2, 3)).square().sum()


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(3000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, dim_feedforward=512, dropout=0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, rank, step):
        text = words(rank, step, (13, 3), 3000)
        y = self.encoder(self.table(text[:12]) * 8)
        return nn.functional.cross_entropy(nn.functional.linear(y, self.table.weight).flatten(0, 1), text[1:].flatten())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.last = nn.LSTM(128, 384, num_layers=2), nn.Linear(384, 32)

    def forward(self, rank, step):
        y, (hidden, _) = self.lstm(drawn(rank, step, 7, 4, 128))
        return self.last(y).square().mean() + hidden.mean()


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.body, self.sometimes = nn.Linear(64, 640), nn.Linear(640, 640), nn.Linear(640, 640)
        self.frozen.weight.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.again = self.body

    def forward(self, rank, step):
        y = self.again(torch.relu(self.body(self.frozen(drawn(rank, step, 5, 64)))))
        if (step + rank) % 4 < 2:
            y = y + self.sometimes(y)
        return y.square().mean() + self.empty.sum()


class SparseWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(3000, 32, sparse=True), nn.Linear(32, 10)

    def forward(self, rank, step):
        y = self.last(torch.tanh(self.table(words(rank, step, (6, 5), 3000)))).flatten(0, 1)
        return nn.functional.cross_entropy(y, words(rank, step, (30,), 10))


# --- the ways of training ---


def ddp_of(net, way, name):
    options = {}
    if way == "small_buckets":
        options["bucket_cap_mb"] = 0.4
    if way == "static_graph":
        options["static_graph"] = True
    if way == "unused":
        options["find_unused_parameters"] = True
    if way == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [name])
    ddp = DistributedDataParallel(net, **options)
    # By another name, because PyTorch allows bfloat16 on GPUs only, and asks for names.
    if way in ("fp16", "bf16"):
        hook = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[way]
        ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    return ddp


def train(net, way, name, rank, rate, steps):
    """Returns the losses of all steps. Those of a step with two parts are their sum."""
    ddp = ddp_of(net, way, name)
    momentum = 0 if isinstance(net, SparseWords) else 0.9
    if way == "zero":
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=rate, momentum=momentum)
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)

    def step_of(step):
        optimizer.zero_grad()
        if way == "two_forwards":
            loss = ddp(rank, 2 * step) + ddp(rank, 2 * step + 1)
            loss.backward()
        elif way == "no_sync":
            with ddp.no_sync():
                first = ddp(rank, 2 * step)
                first.backward()
            second = ddp(rank, 2 * step + 1)
            second.backward()
            loss = first.detach() + second
        else:
            loss = ddp(rank, step)
            loss.backward()
        optimizer.step()
        return loss.item()

    if way == "join":
        with ddp.join():
            return [step_of(step) for step in range(steps - rank)]
    return [step_of(step) for step in range(steps)]


def answer_all(rank, questions):
    torch.set_num_threads(1)
    for line in questions:
        model, dtype, way, rate, steps, file = line.split()
        torch.set_default_dtype(getattr(torch, dtype))
        way, _, name = way.partition(":")
        net = globals()[model]()
        net.load_state_dict(torch.load(file, weights_only=False))
        losses = [None, None]
        dist.all_gather_object(losses, train(net, way, name, rank, float(rate), int(steps)))
        if rank == 0:
            torch.save(dict(net.state_dict()), file + ".after")
            print(*[repr(loss) for of_rank in losses for loss in of_rank], flush=True)


if __name__ == "__main__":
    two_processes.run(answer_all)
