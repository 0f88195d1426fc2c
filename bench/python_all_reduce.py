#!/usr/bin/env python3
"""torch.distributed.all_reduce from Python, with Muster and with gloo, alternately in the same processes.

    PYTHONPATH=build/release/python bench/python_all_reduce.py [--ranks 2] [--rounds 20]

Prints one JSON object per line: bytes, backend, microseconds per operation on rank 0 (best round; blocking calls), and for Muster how
many times faster it is.
"""
from __future__ import annotations

import argparse
import json
import os
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import muster  # noqa: F401

SIZES = {16: 200, 64 << 10: 100, 1 << 20: 20, 64 << 20: 2}  # bytes: calls per round; rounds are short, so that at least one is undisturbed


def measure(rank: int, ranks: int, rounds: int, store: str) -> None:
    dist.init_process_group("muster", init_method=f"file://{store}", rank=rank, world_size=ranks)
    groups = {"gloo": dist.new_group(backend="gloo"), "muster": dist.group.WORLD}
    for size, calls in SIZES.items():
        tensor = torch.zeros(size // 4)
        best = dict.fromkeys(groups, float("inf"))
        for round_ in range(rounds + 1):  # the first one warms up
            for name, group in groups.items():
                dist.barrier(group)
                began = time.perf_counter()
                for _ in range(calls if round_ else 1 + calls // 10):
                    dist.all_reduce(tensor, group=group)
                if round_:
                    best[name] = min(best[name], (time.perf_counter() - began) / calls * 1e6)
        if rank == 0:
            for name, microseconds in best.items():
                row = {"benchmark": "python_all_reduce", "ranks": ranks, "bytes": size, "backend": name,
                       "microseconds": round(microseconds, 2)}
                if name == "muster":
                    row["times_faster_than_gloo"] = round(best["gloo"] / microseconds, 1)
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, args=(args.ranks, args.rounds, f"{folder}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
