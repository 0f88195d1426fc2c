"""torch.optim: the peer of bench_optimizers. See bench/optimizers.cpp for the cases.

python bench/peers/optimizers_torch.py [THREADS]
"""

import sys

import torch
from measure import best_us, row


def parameters():
    layer = [(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,), (512,), (512,), (512,), (512,)]
    all = [torch.nn.Parameter(torch.randn(shape) * 0.02) for _ in range(8) for shape in layer]
    for parameter in all:
        parameter.grad = torch.randn_like(parameter) * 0.01
    return all


def main():
    if len(sys.argv) > 1:
        torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    for name, kind, options in (("sgd_momentum", torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}), ("adamw", torch.optim.AdamW, {"lr": 1e-6}),
                                ("adagrad", torch.optim.Adagrad, {"lr": 1e-6})):
        for way in ("fused", "foreach"):
            optimizer = kind(parameters(), **options, **{way: True})
            row("optimizers", name, us=best_us(10, optimizer.step), impl=f"torch-{way}", threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
