"""TorchOpt: the peer of bench_meta. See bench/meta.cpp for the cases.

python bench/peers/meta_torchopt.py
"""

import ctypes
import os
from pathlib import Path

import torch
import torchopt
from measure import best_us, row
from torch import nn
from torch.nn import functional


def make_net():
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def tasks():
    x = torch.rand(8, 2, 10, 1) * 10 - 5
    return torch.stack([x, (x + torch.rand(8, 1, 1, 1) * 3.14).sin() * (torch.rand(8, 1, 1, 1) * 4.9 + 0.1)], 1)


def maml(kind, **options):
    """Returns a function that takes a meta-step."""
    net = make_net()
    outer = torch.optim.Adam(net.parameters(), lr=1e-3)
    inner = kind(net, lr=0.01, **options)

    def step():
        state, inner_state = torchopt.extract_state_dict(net), torchopt.extract_state_dict(inner)
        losses = []
        for task in tasks().unbind():
            for _ in range(5):
                inner.step(functional.mse_loss(net(task[0][0]), task[1][0]))
            losses.append(functional.mse_loss(net(task[0][1]), task[1][1]))
            torchopt.recover_state_dict(net, state)
            torchopt.recover_state_dict(inner, inner_state)
        outer.zero_grad()
        torch.stack(losses).mean().backward()
        outer.step()

    return step


def resident_kb():
    ctypes.CDLL(None).malloc_trim(0)  # what is free, but kept for the next allocation, does not leak
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // 1024


def memory():
    step = maml(torchopt.MetaSGD)
    for _ in range(200):
        step()
    before = resident_kb()
    for _ in range(1800):
        step()
    row("meta", "memory", impl="torchopt", kb=resident_kb() - before)


def adam_step(impl, accelerated):
    adam = torchopt.adam(lr=1e-3, use_accelerated_op=accelerated)
    parameters = [torch.rand(64) for _ in range(100)]
    gradients = [torch.rand(64, requires_grad=True) for _ in range(100)]
    state = adam.init(parameters)
    ones = [torch.ones(64)] * 100

    def step():
        updates, _ = adam.update(gradients, state, params=parameters, inplace=False)
        torch.autograd.grad(updates, gradients, ones)

    row("meta", "adam_100", impl=impl, us=best_us(10, step))


def main():
    torch.set_num_threads(1)
    row("meta", "maml_sgd", impl="torchopt", us=best_us(10, maml(torchopt.MetaSGD)))
    row("meta", "maml_adam", impl="torchopt", us=best_us(10, maml(torchopt.MetaAdam)))
    row("meta", "maml_adam", impl="torchopt, accelerated", us=best_us(10, maml(torchopt.MetaAdam, use_accelerated_op=True)))
    adam_step("torchopt", False)
    adam_step("torchopt, accelerated", True)
    memory()


if __name__ == "__main__":
    main()
