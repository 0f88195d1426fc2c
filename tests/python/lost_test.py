"""Ranks that die, and groups that are aborted: what the others are told, and what they can do then."""
from __future__ import annotations

import os
import signal
import threading
import unittest

import torch
import torch.distributed as dist

import muster
from ranks import raised, run


class Lost(unittest.TestCase):
    def test_a_killed_rank_is_named(self):
        def body(rank):
            dist.barrier()
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1 << 20)))

        answers = run(4, body, destroy=False)
        self.assertIsNone(answers[2])
        for text in (answers[0], answers[1], answers[3]):
            self.assertIn("rank 2 (pid", text)
            self.assertIn("died", text)

    def test_a_killed_rank_of_a_part_has_its_number_in_the_job(self):
        def body(rank):
            group = dist.new_group([1, 2])
            if rank == 0:
                return None
            dist.barrier(group)
            if rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1 << 20), group=group))

        text = run(3, body, destroy=False)[1]
        self.assertIn("rank 2 (pid", text)
        self.assertIn("seen by rank 1", text)

    def test_a_receive_from_a_killed_rank(self):
        def body(rank):
            if rank == 1:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            work = dist.irecv(torch.ones(1), 1)
            dist.barrier()
            return raised(dist.DistBackendError, work.wait)

        self.assertIn("rank 1 (pid", run(2, body, destroy=False)[0])

    def test_abort_ends_what_is_under_way_on_all_ranks(self):
        def body(rank):
            group = dist.new_group([0, 1])
            if rank == 0:
                work = dist.all_reduce(torch.ones(1), group=group, async_op=True)  # rank 1 does not take part
                aborting = threading.Timer(0.2, group.abort)
                aborting.start()
                text = raised(dist.DistBackendError, work.wait)
                aborting.join()
            else:
                text = raised(dist.DistBackendError, lambda: dist.recv(torch.ones(1), 0, group=group))
            t = torch.ones(1)
            dist.all_reduce(t)
            return text, t.item()

        for text, value in run(2, body):
            self.assertIn("rank 0 aborted group", text)
            self.assertEqual(value, 2.0)

    def test_abort_spoils_nothing_that_peers_have_yet_to_finish(self):
        def body(rank):
            store, values = dist.PrefixStore("abort", dist.distributed_c10d._get_default_store()), []
            for i in range(50):
                group = muster.create_process_group(dist.PrefixStore(str(i), store), rank, 2)
                t = torch.ones(1 << (i % 20))
                group.allreduce(t).wait()
                values.append(t.sum().item() / t.numel())
                group.abort()
            return values

        self.assertEqual(run(2, body), [[2.0] * 50] * 2)

    def test_a_new_group_after_a_failure(self):
        def body(rank):
            group = dist.new_group([0, 1])
            raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1 + rank), group=group))
            t = torch.ones(1)
            dist.all_reduce(t)
            dist.all_reduce(t, group=dist.new_group([0, 1]))
            return t.item()

        self.assertEqual(run(2, body), [4.0, 4.0])


if __name__ == "__main__":
    unittest.main(verbosity=2)
