"""What TorchOpt computes, for unit/meta_test.cpp.

Reads lines "functional|optimizer", "meta|steps|optimizer", … and answers each with numbers on one line. The optimizer is
the expression of a constructor; that of a meta-optimizer has no module.
"""
import sys

import torch
import torchopt


def gradient(parameter, index, step):  # meta_test.cpp has the same
    return parameter * (0.5 + index) + torch.cos(parameter * 3 + 0.3 * step)


def functional(expression):
    parameters = tuple(torch.linspace(-1, 2, n) for n in (7, 33))
    optimizer = eval("torchopt." + expression)
    state = optimizer.init(parameters)
    for step in range(100):
        gradients = tuple(gradient(parameter, i, step) for i, parameter in enumerate(parameters))
        updates, state = optimizer.update(gradients, state, params=parameters, inplace=False)
        parameters = torchopt.apply_updates(parameters, updates, inplace=False)
    return torch.cat(parameters)


def points(step):
    x = torch.linspace(-2, 2, 16).unsqueeze(1)
    return x, torch.sin(1.5 * x + 0.1 * step)


def meta(steps, expression):
    net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_((torch.cos(torch.arange(parameter.numel()) * 1.3 + i) * 0.5).view_as(parameter))
    first = tuple(net.parameters())
    name, _, options = expression.partition("(")
    optimizer = eval(f"torchopt.{name}(net, {options}")
    for step in range(int(steps)):
        x, y = points(step)
        optimizer.step((net(x) - y).square().mean())
    x, y = points(1000)
    loss = (net(x) - y).square().mean()
    gradients = torch.autograd.grad(loss, first)
    last = [p for container in torchopt.extract_state_dict(net, by="reference").params for p in container.values()]
    return torch.cat([t.detach().flatten() for t in (*last, *gradients)])


def schedule(expression):
    function = eval("torchopt.schedule." + expression)
    return torch.tensor([float(function(count)) for count in range(40)])


def main():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.double)  # else TorchOpt's bias correction is of single precision
    for line in sys.stdin:
        what, *arguments = line.strip().split("|")
        numbers = globals()[what](*arguments)
        print(" ".join(repr(number) for number in numbers.detach().flatten().tolist()), flush=True)


if __name__ == "__main__":
    main()
