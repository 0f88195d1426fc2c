"""Runs the body of a test as the ranks of a job. The ranks are forks of this process, because importing torch takes seconds.

This process itself must not compute with torch before: its threads would be missing in the forks.
"""
from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import numpy  # noqa: F401
except ImportError:
    print("skipped: torch.distributed's object collectives need numpy (pip install numpy)")
    sys.exit(77)

import torch
import torch._dynamo  # for all forks: DistributedDataParallel and optimizers import it when they are made, which takes seconds
import torch.distributed as dist

import muster

torch.set_num_threads(1)  # so that this process has no threads, which its forks would lack
gc.collect()
gc.freeze()  # Otherwise each fork's garbage collections visit, and so copy, all that torch has made.

LIMIT = 600.0  # seconds that a test's ranks, and so every wait, may take: only a hang reaches it


class RankFailed(AssertionError):
    """What a rank raised, with its traceback."""


def fork(n: int, body: Callable[[int], Any]) -> list[Any]:
    """Runs body(rank) in n forks. Returns what each returned, None for one that was killed. Raises RankFailed if a rank raised."""
    pids, pipes = [], []
    sys.stdout.flush()
    sys.stderr.flush()
    for rank in range(n):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(reader)
                try:
                    answer = (True, body(rank))
                    status = 0
                except BaseException:  # noqa: BLE001
                    answer = (False, traceback.format_exc())
                with os.fdopen(writer, "wb") as pipe:
                    pickle.dump(answer, pipe)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        os.close(writer)
        pids.append(pid)
        pipes.append(reader)
    answers = [_read(pipe, time.monotonic() + LIMIT) for pipe in pipes]
    for pid, answer in zip(pids, answers):
        if answer is None:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    failed = [f"rank {rank}: {answer[1]}" for rank, answer in enumerate(answers) if answer and not answer[0]]
    failed += [f"rank {rank} took more than {LIMIT} s" for rank, answer in enumerate(answers) if answer is None]
    if failed:
        raise RankFailed("\n".join(failed))
    return [answer[1] for answer in answers]


def _read(pipe: int, until: float) -> tuple[bool, Any] | None:
    with os.fdopen(pipe, "rb", buffering=0) as file:
        data = bytearray()  # bytes would be copied whole for every piece that comes
        while True:
            if not select.select([file], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            more = file.read(1 << 16)
            if not more:
                return pickle.loads(data) if data else (True, None)
            data += more


def run(n: int, body: Callable[[int], Any], backend: str = "muster", timeout: float = LIMIT, destroy: bool = True) -> list[Any]:
    """Does the same as fork(), with a process group around the body."""
    with tempfile.TemporaryDirectory() as folder:

        def with_group(rank: int) -> Any:
            dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=n,
                                    timeout=timedelta(seconds=timeout))
            answer = body(rank)
            if destroy:
                dist.destroy_process_group()
            return answer

        return fork(n, with_group)


def run_threads(n: int, body: Callable[[int, Any], Any], timeout: float = LIMIT) -> list[Any]:
    """Runs body(rank, backend) in n threads of a fork, each with its own backend."""

    def rank_threads(_: int) -> list[Any]:
        store, answers, errors = dist.HashStore(), [None] * n, []

        def one(rank: int) -> None:
            try:
                answers[rank] = body(rank, muster.create_backend(store, rank, n, timedelta(seconds=timeout)))
            except BaseException:  # noqa: BLE001
                errors.append(f"thread {rank}: {traceback.format_exc()}")

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RankFailed("\n".join(errors))
        return answers

    return fork(1, rank_threads)[0]


def say(key: str) -> None:
    """Tells the other ranks of a run() that something has happened."""
    dist.distributed_c10d._get_default_store().set(key, "1")


def hear(key: str) -> str:
    """Waits until a rank has said so."""
    dist.distributed_c10d._get_default_store().wait([key], timedelta(seconds=LIMIT))
    return key


def raised(kind: type[BaseException], call: Callable[[], Any]) -> str:
    """Returns the text of the exception of type `kind` that call() raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def cpu() -> torch.device:
    return torch.device("cpu")
