"""Real processes: the example under torchrun and `muster run`, a script of Gloo, and torch.multiprocessing's spawn."""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import muster  # noqa: F401
from ports import ReservedPort

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = [str(ROOT / "python" / "examples" / "train_ddp.py"), "--steps", "20"]


# A script that knows nothing of Muster.
GLOO_SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="env://")
t = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(t)
print("rank", dist.get_rank(), "of", dist.get_world_size(), "has", t.tolist())
dist.destroy_process_group()
"""


def spawned(rank: int, port: int) -> None:
    dist.init_process_group("muster", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    t = torch.full((3,), float(rank))
    dist.all_reduce(t)
    assert t.tolist() == [1.0] * 3
    dist.destroy_process_group()


class Launchers(unittest.TestCase):
    def example(self, *command: str) -> None:
        done = subprocess.run([*command, *EXAMPLE], text=True, capture_output=True, timeout=600,
                              env=dict(os.environ, OMP_NUM_THREADS="1"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("steps/s with muster on 2 processes", done.stdout)
        self.assertNotIn("Traceback", done.stderr)

    def test_torchrun(self):
        self.example(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

    def test_muster_run(self):
        self.example(os.environ["MUSTER_COMMAND"], "run", "-n", "2", sys.executable)

    def test_muster_run_of_a_gloo_script(self):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # without the module
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(GLOO_SCRIPT)
            script.flush()
            done = subprocess.run([os.environ["MUSTER_COMMAND"], "run", "-n", "2", sys.executable, script.name],
                                  text=True, capture_output=True, timeout=600, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()),
                         [f"[{rank}] rank {rank} of 2 has [3.0, 3.0, 3.0]" for rank in (0, 1)])

    def test_spawn_with_tcp(self):
        with ReservedPort() as port:
            mp.spawn(spawned, args=(port,), nprocs=2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
