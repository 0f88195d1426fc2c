"""Runs PyTorch's own distributed tests, which come with it, on Muster's backend.

    pytorch_tests.py [--ranks 4] [--list] [--verbose] [PATTERN…]      PATTERN: part of a test's name

They are the tests that PyTorch has for gloo on CPU tensors: torch/testing/_internal/distributed/distributed_test.py asks in
many places whether the backend is gloo. This script makes Muster's backend count as gloo there. PyTorch starts new processes
for each test. Here the same few processes run one test after another, each test with its own process groups, which takes half
a minute instead of an hour. Some tests need 8 ranks.

Exit status: 0, all passed; 1, some failed; 77, this PyTorch has no such tests.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.util
import io
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import unittest
from datetime import timedelta
from pathlib import Path

from ports import ReservedPort

SECONDS = 40  # that a test may take
NAME = "torch.testing._internal.distributed.distributed_test"


def load(ranks: int, folder: str, port: int) -> types.ModuleType:
    """Returns PyTorch's module, in which Muster replaces gloo as the backend under test."""
    os.environ.update(BACKEND="muster", WORLD_SIZE=str(ranks), TEMP_DIR=folder, OMP_NUM_THREADS="1",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), INIT_METHOD=f"file://{folder}/init")
    if importlib.util.find_spec("expecttest") is None:  # these tests import it, but do not use it
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stand_in
    import torch
    import torch.distributed

    import muster

    torch.set_num_threads(1)
    torch.distributed.monitored_barrier = muster.monitored_barrier
    from torch.testing._internal import common_distributed

    cases = common_distributed.DistTestCases
    for features in (cases.skip_collective, cases.backend_feature):
        for backends in features.values():
            if "gloo" in backends:
                backends.add("muster")
    cases.backend_feature["plugin"].add("muster")
    spec = importlib.util.find_spec(NAME)
    source = Path(spec.origin).read_text()
    source = re.sub(r'(BACKEND (?:==|!=)) "gloo"', r'\1 "muster"', source)
    source = re.sub(r"((?:PROFILING_SUPPORTED_BACKENDS) = \[)", r'\1"muster", ', source)
    source = re.sub(r'(dist\.get_backend\(\) (?:==|!=)) (?:"gloo"|dist\.Backend\.GLOO)', r'\1 "muster"', source)
    source = source.replace('BACKEND != "mpi"', 'BACKEND not in ("mpi", "muster")')  # all_to_all of lists, on CPU
    source = source.replace('require_backend_is_available({"gloo"})', 'require_backend_is_available({"muster"})')
    module = types.ModuleType(NAME)
    module.__file__ = spec.origin
    sys.modules[NAME] = module
    exec(compile(source, spec.origin, "exec", dont_inherit=True), module.__dict__)
    return module


def prepare(module: types.ModuleType) -> type:
    """Returns the class whose methods are the tests."""
    class Tests(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self) -> None:  # PyTorch's setUp() would start processes
            pass

        def tearDown(self) -> None:
            pass

    return Tests


def run_one(case: type, module: types.ModuleType, name: str, rank: int, ranks: int, folder: str) -> tuple[str, str]:
    """Runs one test in this rank. Returns ("passed" | "skipped" | "failed", text)."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    out = io.StringIO()
    try:
        test = case(name)
        if getattr(getattr(case, name), "__unittest_skip__", False):
            return "skipped", getattr(case, name).__unittest_skip_why__
        test.rank, test.file_name = rank, f"{folder}/{name}"
        module.Barrier.barrier_id = 0
        with contextlib.redirect_stderr(out):
            dist.init_process_group("muster", init_method=f"file://{folder}/{name}", rank=rank, world_size=ranks,
                                    timeout=timedelta(seconds=module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)))
            getattr(test, name)()
            module.Barrier.sync()  # as PyTorch does: no rank leaves while another still tests
        return "passed", ""
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        return ("skipped", reasons.get(end.code, str(end.code))) if end.code else ("passed", "")
    except BaseException:  # noqa: BLE001
        return "failed", traceback.format_exc() + out.getvalue()[-2000:]
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def worker(case: type, module: types.ModuleType, names: list[str], rank: int, ranks: int, folder: str, pipe: int) -> None:
    """Runs the tests and writes an answer for each. Ends when a test fails, so that its remains cannot harm the next."""
    for name in names:
        answer = run_one(case, module, name, rank, ranks, folder)
        data = pickle.dumps(answer)
        os.write(pipe, len(data).to_bytes(8, "little"))
        os.write(pipe, data)
        if os.read(0, 1) != b"g":
            return


class Crew:
    """The ranks, which are forks of this process. They end when a test fails."""

    def __init__(self, case: type, module: types.ModuleType, names: list[str], ranks: int, folder: str):
        self.module = module
        module.Barrier.init()
        self.pids, self.answers, self.go = [], [], []
        for rank in range(ranks):
            answer_in, answer_out = os.pipe()
            go_in, go_out = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.dup2(go_in, 0)
                for fd in [answer_in, go_out, *self.answers, *self.go]:
                    os.close(fd)
                try:
                    worker(case, module, names, rank, ranks, folder, answer_out)
                finally:
                    os._exit(0)
            os.close(answer_out)
            os.close(go_in)
            self.pids.append(pid)
            self.answers.append(answer_in)
            self.go.append(go_out)

    def result(self) -> tuple[str, str]:
        """Returns the result of the test under way."""
        import select

        results, until = [], time.monotonic() + SECONDS
        for rank, fd in enumerate(self.answers):
            results.append(("failed", f"rank {rank} took more than {SECONDS} s"))
            data = b""
            while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "little"):
                if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                    break
                more = os.read(fd, 1 << 16)
                if not more:
                    results[-1] = ("failed", f"rank {rank} ended")
                    break
                data += more
            else:
                results[-1] = pickle.loads(data[8:])
        worst = sorted(results, key=lambda result: ["failed", "passed", "skipped"].index(result[0]))[0]
        texts = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(results) if kind == worst[0] and text]
        return worst[0], "\n".join(texts[:2])

    def proceed(self) -> None:
        self.module.Barrier.init()  # removes files, so once for all ranks
        for fd in self.go:
            with contextlib.suppress(BrokenPipeError):
                os.write(fd, b"g")

    def end(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for fd in self.answers + self.go:
            os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="say why tests were skipped")
    args = parser.parse_args()
    if importlib.util.find_spec(NAME) is None:
        print("this PyTorch has no distributed_test")
        return 77
    if importlib.util.find_spec("numpy") is None:
        print("PyTorch's tests need numpy (pip install numpy)")
        return 77
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with tempfile.TemporaryDirectory() as folder, ReservedPort() as port:
        for sub in ("barrier", "test_dir", "init_dir"):
            os.mkdir(f"{folder}/{sub}")
        module = load(args.ranks, folder, port)
        case = prepare(module)
        names = [name for name in unittest.TestLoader().getTestCaseNames(case)
                 if "cuda" not in name and "nccl" not in name
                 and (not args.patterns or any(p in name for p in args.patterns))]
        if args.list:
            print("\n".join(names))
            return 0
        counts: collections.Counter[str] = collections.Counter()
        failed, crew = [], None
        began = time.monotonic()
        for i, name in enumerate(names):
            crew = crew or Crew(case, module, names[i:], args.ranks, folder)
            kind, text = crew.result()
            counts[kind] += 1
            if kind == "failed":
                failed.append(name)
                crew.end()
                crew = None
                print(f"FAILED {name}\n{text}\n", flush=True)
            else:
                if args.verbose:
                    print(kind, name, text.splitlines()[0] if text else "", flush=True)
                crew.proceed()
        if crew:
            crew.end()
        print(f"{counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed, on {args.ranks} ranks in "
              f"{time.monotonic() - began:.0f} s")
        for name in failed:
            print(f"  failed: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
