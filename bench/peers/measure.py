"""Measures the peers that are written in Python, as bench/measure.h measures Muster."""

import ctypes
import json
import time


def row(bench, case, impl="torch", **figures):
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"bench": bench, "case": case, "impl": impl, **rounded}), flush=True)


def best_us(calls, call):
    """The best of five means, in microseconds."""
    best = float("inf")
    for _ in range(5):
        call()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def proportional_set_size():
    """In MiB, as bench/memory.h."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def proportional_set_size_in_use():
    """In MiB, as bench/memory.h: without the free memory that malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return proportional_set_size()
