"""Scales of Python's torch.amp.GradScaler, for unit/grad_scaler_test.cpp.

Reads lines "arguments of the constructor|letters", one letter per iteration: . for finite gradients, i for an infinite one,
n for NaN. Answers each line with the scale, the growth tracker and the parameter after each iteration.
"""
import sys

import no_dynamo  # noqa: F401
import torch


def main():
    for line in sys.stdin:
        arguments, letters = line.strip().split("|")
        scaler = eval(f"torch.amp.GradScaler('cpu', {arguments})")
        parameter = torch.ones(1, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        numbers = []
        for letter in letters:
            optimizer.zero_grad()
            factor = {".": 1.0, "i": float("inf"), "n": float("nan")}[letter]
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            numbers += [scaler.get_scale(), scaler._get_growth_tracker(), parameter.item()]
        print(" ".join(repr(number) for number in numbers), flush=True)


if __name__ == "__main__":
    main()
