"""What torch.distributed asks of a backend beside its operations, as gloo answers it."""
from __future__ import annotations

import unittest
from datetime import timedelta

import torch
import torch.distributed as dist

import muster  # noqa: F401, registers the backend
from ranks import run


class Interface(unittest.TestCase):
    def test_timing_can_be_switched_on(self):
        def body(rank):
            dist.distributed_c10d._get_default_group()._enable_collectives_timing()
            t = torch.ones(1)
            dist.all_reduce(t)
            return t.item()

        self.assertEqual(run(2, body), [2.0, 2.0])

    def test_dist2(self):
        try:
            from torch.distributed import _dist2
        except ImportError:
            self.skipTest("this torch has no torch.distributed._dist2")
        factory = _dist2._BACKENDS["muster"]

        def body(rank):
            store = dist.PrefixStore("dist2", dist.distributed_c10d._get_default_store())
            group = factory(store, rank, 2, timedelta(seconds=60), torch.device("cpu"))
            t = torch.ones(3)
            group.allreduce(t).wait()
            return t.tolist()

        self.assertEqual(run(2, body), [[2.0] * 3] * 2)
        with self.assertRaises(ValueError):
            factory(None, 0, 1, timedelta(seconds=1), torch.device("cuda"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
