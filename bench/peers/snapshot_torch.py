"""torch.distributed.checkpoint: the peer of bench_snapshot's 512 MB, from two ranks.

torchrun --nproc-per-node 2 bench/peers/snapshot_torch.py FOLDER
"""

import os
import shutil
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


def main():
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), sys.argv[1]
    state = {f"p{i}": torch.rand(1000, 1000) for i in range(128)}

    def best(call, after=lambda: None):
        times = []
        for i in range(4):
            dist.barrier()
            start = time.perf_counter()
            result = call()
            times.append(time.perf_counter() - start)
            after(result) if result is not None else None
        return min(times) * 1e6

    def report(op, us, impl="torch-dcp"):
        if rank == 0:
            print(f'{{"bench": "snapshot", "op": "{op}", "impl": "{impl}", "ranks": {dist.get_world_size()}, "us": {us:.2f}}}', flush=True)

    def save():
        writer = dcp.FileSystemWriter(os.path.join(folder, "dcp"), sync_files=True)
        dcp.save(state, storage_writer=writer, no_dist=False)

    def load():
        dcp.load(state, storage_reader=dcp.FileSystemReader(os.path.join(folder, "dcp")))

    report("save 512 MB", best(save))
    report("load 512 MB", best(load))
    report("stall 512 MB", best(lambda: dcp.async_save(state, storage_writer=dcp.FileSystemWriter(os.path.join(folder, "async"), sync_files=True)),
                                lambda future: future.result()))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
