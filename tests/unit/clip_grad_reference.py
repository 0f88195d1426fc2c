"""torch.nn.utils' clipping of gradients, for unit/clip_grad_test.cpp.

Reads lines "dtype|kind|limit|norm_type|foreach": "float32" or "float64"; "norm" or "value"; foreach is "True" or
"False". Answers each with the norm (of "value": 0), and all elements of the clipped gradients.
"""
import math
import sys

import torch

SHAPES = [(3, 5), (), (0, 2), (7,), (2, 1, 4), (300, 70)]


def gradient(index, shape, dtype):
    count = math.prod(shape)
    return torch.cos(torch.arange(count, dtype=torch.float64) * 0.7 + index).mul(index + 1).view(shape).to(dtype)


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, kind, limit, norm_type, foreach = line.rstrip("\n").split("|")
        foreach = foreach == "True"
        parameters = [torch.zeros(shape, dtype=getattr(torch, name), requires_grad=True) for shape in SHAPES]
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient(index, parameter.shape, parameter.dtype)
        norm = 0.0
        if kind == "norm":
            # vector_norm of an empty tensor has no largest element, which torch says with an error.
            some = [one for one in parameters if one.numel() > 0]
            norm = torch.nn.utils.clip_grad_norm_(some, float(limit), float(norm_type), foreach=foreach).item()
        else:
            torch.nn.utils.clip_grad_value_(parameters, float(limit), foreach=foreach)
        elements = [norm] + torch.cat([one.grad.flatten() for one in parameters]).double().tolist()
        print(*map(repr, elements), flush=True)


if __name__ == "__main__":
    main()
