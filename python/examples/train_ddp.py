"""A small model on the CPU with DistributedDataParallel over Muster.

    torchrun --nproc-per-node 2 train_ddp.py
    muster run -n 2 python train_ddp.py
    torchrun --nproc-per-node 2 train_ddp.py --backend gloo     # the same with gloo
"""
from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import muster  # noqa: F401  registers the backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="muster")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()

    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, torch.get_num_threads() // size))

    # To learn: the sum of each picture's left half minus that of its right half.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, args.width), torch.nn.ReLU(), torch.nn.Linear(args.width, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)

    began = time.perf_counter()
    for step in range(1, args.steps + 1):
        x = torch.randn(128, 64, generator=generator)
        y = x[:, :32].sum(1, keepdim=True) - x[:, 32:].sum(1, keepdim=True)
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, args.steps // 5) == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / size:.4f}", flush=True)
    if rank == 0:
        print(f"{args.steps / (time.perf_counter() - began):.0f} steps/s with {args.backend} on {size} processes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
