"""Trajectories of Python's torch.optim, for unit/optim_test.cpp.

Reads lines "dtype|expression of a constructor, without its parameters|scheduler or nothing" and answers each with the
parameters after every tenth of 100 steps and the rates, as numbers on one line.
"""
import sys

import no_dynamo  # noqa: F401
import torch
from torch.optim import lr_scheduler  # noqa: F401 (named by the lines)


def give_gradients(parameters, step):  # optim_test.cpp and optimizers_test.cpp have the same
    for index, parameter in enumerate(parameters):
        at = parameter.detach()
        skipped = index == 1 and step % 7 == 3
        parameter.grad = None if skipped else at * (0.5 + index) + torch.cos(at * 3 + 0.3 * step)


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        dtype, what, schedule = line.strip().split("|")
        dtype = getattr(torch, dtype)
        name, _, arguments = what.partition("(")
        shapes = [(1, 7) if name == "Muon" else (7,), (3, 11)]
        parameters = [torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.double).to(dtype).view(shape).requires_grad_() for shape in shapes]
        if name in ("SGD", "Adagrad", "Adam", "AdamW"):
            arguments = "fused=True, " + arguments
        optimizer = eval(f"torch.optim.{name}(parameters, {arguments}")
        scheduler = eval(f"lr_scheduler.{schedule}") if schedule else None
        numbers = []
        for step in range(100):
            give_gradients(parameters, step)
            optimizer.step()
            if scheduler:
                scheduler.step()
                numbers.append(optimizer.param_groups[0]["lr"])
            if step % 10 == 9:
                for parameter in parameters:
                    numbers += parameter.flatten().tolist()
        print(" ".join(repr(number) for number in numbers), flush=True)


if __name__ == "__main__":
    main()
