"""What TorchOpt computes, for unit/meta_test.cpp.

Reads lines "functional|optimizer", "meta_parameters|steps|optimizer", … and answers each with numbers on one line. The optimizer is
the expression of a constructor; that of a meta-optimizer has no module.
"""
import functools
import sys

import no_dynamo  # noqa: F401
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


@functools.cache
def meta(steps, expression):
    """The parameters after the steps, and the gradient of a loss after them by those before."""
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
    return tuple(torch.cat([t.detach().flatten() for t in of]) for of in (last, gradients))


def meta_parameters(steps, expression):
    return meta(steps, expression)[0]


def meta_gradients(steps, expression):
    return meta(steps, expression)[1]


def root(solver):
    """The gradient of a function of a ridge regression's solution by the two arguments of the regression."""
    x = torch.cos(torch.arange(24) * 0.7).view(8, 3)
    y = torch.sin(torch.arange(8) * 0.9)
    l2 = torch.tensor(0.3, requires_grad=True)
    shift = torch.tensor([0.1, -0.2, 0.4], requires_grad=True)

    def optimality(w, l2, shift):
        return x.T @ (x @ w - y) + l2 * w + shift * w**3

    @torchopt.diff.implicit.custom_root(optimality, argnums=(1, 2), solve=eval("torchopt.linear_solve." + solver))
    def solve(w, l2, shift):
        for _ in range(60):  # Newton's steps
            jacobian = x.T @ x + torch.diag(l2 + 3 * shift * w**2)
            w = w - torch.linalg.solve(jacobian, optimality(w, l2, shift))
        return w

    w = solve(torch.zeros(3), l2, shift)
    return torch.cat([w, *(g.flatten() for g in torch.autograd.grad((w.sin() * torch.arange(1.0, 4)).sum(), (l2, shift)))])


def implicit_module(solver):
    class Inner(torchopt.nn.ImplicitMetaGradientModule, linear_solve=eval("torchopt.linear_solve." + solver)):
        def __init__(self, meta):
            super().__init__()
            self.meta = meta
            self.weight = torch.nn.Parameter(torch.zeros(3))

        def objective(self, x, y):
            return (x @ self.weight - y).square().sum() + (self.meta * self.weight.square()).sum()

        def solve(self, x, y):
            with torch.no_grad():
                self.weight.copy_(torch.linalg.solve(x.T @ x + torch.diag(self.meta), x.T @ y))

    x = torch.cos(torch.arange(24) * 0.7).view(8, 3)
    y = torch.sin(torch.arange(8) * 0.9)
    meta = torch.tensor([0.5, 1.5, 0.2], requires_grad=True)
    inner = Inner(meta)
    inner.solve(x, y)
    return torch.cat([inner.weight, torch.autograd.grad(inner.weight.exp().sum(), meta)[0]])


def zero_order(method, samples, sigma):
    count = 0

    def sampler(shape):
        nonlocal count
        count += 1
        return torch.cos(torch.arange(shape.numel()) * 1.7 + count).view(shape)

    @torchopt.diff.zero_order.zero_order(sampler, method=method, argnums=(0, 1), num_samples=int(samples), sigma=float(sigma))
    def fn(a, b):
        return (a.sin() * b.sum()).sum()

    a, b = torch.linspace(-1, 1, 4).view(2, 2).requires_grad_(), torch.linspace(0, 1, 3).requires_grad_()
    return torch.cat([g.flatten() for g in torch.autograd.grad(fn(a, b) * 3, (a, b))])


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
