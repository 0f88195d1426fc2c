"""Processes as torch.distributed's users have them: forks, multiprocessing, other versions of torch."""
from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import unittest
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import muster  # noqa: F401
from ranks import fork, hear, LIMIT, raised, run, say


def ends_early(rank: int, folder: str, way: str, gone: Any, answers: Any) -> None:
    """A rank of two, which ends without destroying its group."""
    dist.init_process_group("muster", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=timedelta(seconds=LIMIT))
    if rank == 0:
        if way == "send":
            dist.send(torch.full((3,), 7.0), 1)
            return
        raise ValueError("a mistake in training")
    if way == "send":
        gone.wait(LIMIT)
        dist.recv(t := torch.zeros(3), 0)
        answers.put(t.tolist())
    else:
        answers.put(raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(3))))


class Forks(unittest.TestCase):
    def test_a_fork_cannot_use_its_parents_group(self):
        """Its operations would be taken for the parent's: a wrong sum, without an error."""
        def body(rank):
            texts = fork(1, lambda _: (raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(4))),
                                       raised(dist.DistBackendError, lambda: dist.send(torch.ones(4), 1 - rank))))
            say(f"the fork of {rank} has ended")
            hear(f"the fork of {1 - rank} has ended")
            sums = []
            for i in range(5):
                dist.all_reduce(t := torch.full((4,), float(rank + i)))
                sums.append(t[0].item())
            return texts[0], sums

        for texts, sums in run(2, body):
            for text in texts:
                self.assertIn("of which this one is a fork", text)
            self.assertEqual(sums, [1.0 + 2 * i for i in range(5)])

    def both(self, way: str) -> Any:
        """Two processes of multiprocessing, which it forks. They end by os._exit(), without atexit."""
        context = multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            gone, answers = context.Event(), context.SimpleQueue()
            ranks = [context.Process(target=ends_early, args=(rank, folder, way, gone, answers)) for rank in range(2)]
            for rank in ranks:
                rank.start()
            ranks[0].join(LIMIT)
            gone.set()
            ranks[1].join(LIMIT)
            self.assertEqual([rank.exitcode for rank in ranks], [0 if way == "send" else 1, 0])
            return answers.get()

    def test_what_was_sent_arrives_after_the_sender_has_ended(self):
        self.assertEqual(self.both("send"), [7.0] * 3)

    def test_the_exception_that_ends_a_process_is_named(self):
        self.assertIn("rank 0 ended: ValueError: a mistake in training", self.both("raise"))


class Versions(unittest.TestCase):
    def importing(self, code: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=LIMIT, check=False,
                              env=dict(os.environ, OMP_NUM_THREADS="1"))
        self.assertNotEqual(done.returncode, 0)
        return done.stderr

    def test_another_torch_is_named(self):
        built = torch.__version__.split("+")[0]
        self.assertIn(f"built for torch {built}, and this is torch 9.9",
                      self.importing("import torch; torch.__version__ = '9.9'; import muster"))

    def test_a_module_that_is_not_there_is_no_other_torch(self):
        text = self.importing("import sys; sys.modules['muster._muster'] = None; import muster")
        self.assertIn("install Muster with this Python", text)
        self.assertNotIn("built for", text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
