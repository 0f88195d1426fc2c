"""Rates of torch.optim.lr_scheduler over 1,000 steps, for unit/schedules_test.cpp.

Reads lines "optimizer|scheduler", and prints the rates of two groups and the momentum of the first (or the first of its
betas): when the schedule is made, and after each step.
"""
import math
import sys
import warnings

import no_dynamo  # noqa: F401
import torch
from torch.optim.lr_scheduler import *  # noqa: F403 (named by the lines)
from torch.optim.swa_utils import SWALR  # noqa: F401


def metric(step):  # schedules_test.cpp has the same
    return 1 / (1 + step // 40) + 0.001 * math.sin(step)


class Together:
    """Schedules of one optimizer, each of which is stepped at each step."""

    def __init__(self, *schedules):
        self.schedules = schedules

    def step(self):
        for schedule in self.schedules:
            schedule.step()


class Turns(Together):
    """The first one for a number of steps, then the second."""

    def __init__(self, steps, *schedules):
        super().__init__(*schedules)
        self.left = steps

    def step(self):
        self.schedules[0 if self.left > 0 else 1].step()
        self.left -= 1


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Of this file's metric."""

    steps = 0

    def step(self):
        super().step(metric(self.steps))
        self.steps += 1


def main():
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        kind, schedule = line.strip().split("|")
        groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in (0.1, 0.02)]
        optimizer = getattr(torch.optim, kind)(groups, **({"momentum": 0.9} if kind == "SGD" else {}))  # noqa: F841
        scheduler = eval(schedule)
        numbers = []
        for step in range(-1, 1000):
            if step >= 0:
                scheduler.step(*([metric(step)] if schedule.startswith("ReduceLROnPlateau") else []))
            first = optimizer.param_groups[0]
            numbers += [group["lr"] for group in optimizer.param_groups]
            numbers.append(first["momentum"] if "momentum" in first else first["betas"][0])
        print(" ".join(repr(number) for number in numbers), flush=True)


if __name__ == "__main__":
    main()
