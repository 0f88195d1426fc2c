"""Python's torch.optim.LBFGS, for unit/lbfgs_test.cpp, on the problems that it has too.

Answers lines "run|problem|dtype|arguments of LBFGS|steps" with the numbers of the closure's calls and of the directions,
and the parameters after every tenth of the steps. A line "go on|problem|dtype|file|file|steps" makes this many steps from what
state_dict() gave, with the parameters besides, and writes the same to the second file.
"""
import sys

import torch
from optimizers_reference import load_file, save_file, state_dict_of, state_of


def numbers(begin, end, shape, dtype):
    return torch.linspace(begin, end, torch.Size(shape).numel(), dtype=torch.double).to(dtype).view(shape)


def problem(name, dtype):
    """Parameters, and a function that computes the loss."""

    def parameter(begin, end, shape):
        return numbers(begin, end, shape, dtype).requires_grad_()

    if name == "convex":
        w, unused = parameter(-1, 2, (7,)), parameter(0, 1, (2, 2))
        a, b = torch.cos(numbers(0, 50, (20, 7), dtype)), torch.sin(numbers(0, 9, (20,), dtype))
        return [unused, w], lambda: (torch.matmul(a, w) - b).square().sum() + 0.1 * w.pow(4).sum()
    if name == "net":
        x = torch.sin(numbers(0, 70, (32, 3), dtype))
        y = torch.cos(torch.matmul(x, numbers(-1, 1, (3, 2), dtype)) * 2)
        inner, bias, outer = parameter(-1, 1, (8, 3)), parameter(-0.5, 0.5, (8,)), parameter(-0.7, 1, (2, 8))
        return [inner, bias, outer], lambda: (torch.matmul(torch.tanh(torch.matmul(x, inner.t()) + bias), outer.t()) - y).square().mean()
    if name == "valley":
        w = parameter(-1.2, 1, (6,))
        return [w], lambda: (100 * (w[1:] - w[:-1].square()).square() + (1 - w[:-1]).square()).sum()
    if name == "complex":
        z = torch.complex(numbers(-1, 1, (4,), dtype), numbers(0.5, -0.3, (4,), dtype)).requires_grad_()
        u = parameter(-1, 1, (4,))
        c = torch.complex(torch.cos(numbers(0, 20, (6, 4), dtype)), torch.sin(numbers(0, 13, (6, 4), dtype)))
        return [z, u], lambda: (torch.matmul(c, z) - 1).abs().square().sum() + (u - z.real).square().sum() + 0.1 * u.pow(4).sum()
    assert name == "sparse"
    w, t = parameter(-1, 2, (6, 3)), torch.cos(numbers(0, 9, (5, 3), dtype))
    rows = torch.tensor([0, 2, 2, 5, 1])
    return [w], lambda: (torch.nn.functional.embedding(rows, w, sparse=True) - t).pow(4).sum()


def make_steps(optimizer, loss, count):
    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(count):
        optimizer.step(closure)


def run(name, dtype, arguments, steps):
    parameters, loss = problem(name, dtype)
    optimizer = eval(f"torch.optim.LBFGS(parameters, {arguments})")
    values = []
    for _ in range(10):
        make_steps(optimizer, loss, int(steps) // 10)
        for each in parameters:
            real = torch.view_as_real(each.detach()) if each.is_complex() else each.detach()
            values += real.flatten().tolist()
    state = optimizer.state[parameters[0]]
    return [state["func_evals"], state["n_iter"], *values]


def go_on(name, dtype, source, target, steps):
    parameters, loss = problem(name, dtype)
    tensors = load_file(source)
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            parameter.copy_(tensors.pop(f"parameters.{i}"))
    optimizer = torch.optim.LBFGS(parameters)
    state, groups = state_of(tensors, optimizer.defaults)
    groups[0]["params"] = list(range(len(parameters)))
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    make_steps(optimizer, loss, int(steps))
    tensors = state_dict_of(optimizer)
    tensors.update({f"parameters.{i}": parameter.detach() for i, parameter in enumerate(parameters)})
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, target)
    return [0]


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        what, name, dtype, *arguments = line.strip().split("|")
        answer = {"run": run, "go on": go_on}[what](name, getattr(torch, dtype), *arguments)
        print(" ".join(repr(number) for number in answer), flush=True)


if __name__ == "__main__":
    main()
