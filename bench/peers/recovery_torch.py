"""The peer of bench_recovery restart: torchrun --max-restarts 1, Gloo. See bench/recovery.cpp."""

import json
import os
import signal
import time

import torch
import torch.distributed as dist


def tell(event):
    print(json.dumps({"event": event, "t": time.clock_gettime(time.CLOCK_MONOTONIC)}), flush=True)


dist.init_process_group("gloo")
t = torch.ones(16)
dist.all_reduce(t)
if dist.get_rank() == 0:
    tell("first")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    dist.barrier()
    if dist.get_rank() == 1:
        tell("kill")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(t)
dist.destroy_process_group()
