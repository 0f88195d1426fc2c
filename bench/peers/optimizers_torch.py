"""torch.optim: the peer of bench_optimizers. See bench/optimizers.cpp for the cases.

python bench/peers/optimizers_torch.py [THREADS|cuda]
"""

import sys

import torch
from measure import best_us, row


device = "cuda:0" if "cuda" in sys.argv else "cpu"
steps = 50 if device != "cpu" else 1  # the device makes them one after another


def parameters():
    layer = [(1536, 512), (1536,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,), (512,), (512,), (512,), (512,)]
    all = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.02) for _ in range(8) for shape in layer]
    for parameter in all:
        parameter.grad = torch.randn_like(parameter) * 0.01
    return all


def main():
    if len(sys.argv) > 1 and device == "cpu":
        torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    for name, kind, options in (("sgd_momentum", torch.optim.SGD, {"lr": 1e-6, "momentum": 0.9}), ("adamw", torch.optim.AdamW, {"lr": 1e-6}),
                                ("adagrad", torch.optim.Adagrad, {"lr": 1e-6})):
        for way in ("fused", "foreach"):
            optimizer = kind(parameters(), **options, **{way: True})

            def call():
                for _ in range(steps):
                    optimizer.step()
                if device != "cpu":
                    torch.cuda.synchronize()

            try:
                us = best_us(10, call) / steps
            except RuntimeError as error:  # no fused Adagrad for CUDA, for example
                print(f"{name} {way}: {error}", file=sys.stderr)
                continue
            row("optimizers", name, us=us, impl=f"torch-{way}", device=device, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
