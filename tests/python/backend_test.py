"""The backend itself: names, errors and their texts, timeouts, lost peers, the end of groups and processes, threads."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from datetime import timedelta

import torch
import torch.distributed as dist

import muster
from ranks import LIMIT, cpu, fork, hear, raised, run, run_threads, say


def await_sleep(pid):
    """Waits until a process with one thread of Python is found asleep a few times in a row (tests/support/asleep.h)."""
    found = 0
    while found < 5:
        with open(f"/proc/{pid}/stat") as file:
            found = found + 1 if file.read().rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0)


class Registration(unittest.TestCase):
    def test_is_known_for_cpu(self):
        self.assertTrue(dist.is_backend_available("muster"))
        self.assertEqual(dist.Backend.backend_capability["muster"], ["cpu"])
        self.assertEqual(dist.Backend.default_device_backend_map["cpu"], "gloo")

    def test_names(self):
        def body(rank):
            group = dist.distributed_c10d._get_default_group()
            return dist.get_backend(), group.name(), group._get_backend(cpu()).name(), group._get_backend(cpu()).size()

        self.assertEqual(run(2, body), [("muster", "muster", "muster", 2)] * 2)

    def test_names_with_devices(self):
        config = dist.distributed_c10d.BackendConfig(dist.Backend("cpu:muster,cuda:nccl"))
        self.assertEqual(config.get_device_backend_map(), {"cpu": "muster", "cuda": "nccl"})

        def body(rank):
            ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
            t = torch.ones(1)
            dist.all_reduce(t)
            group = dist.distributed_c10d._get_default_group()
            return dist.get_backend(), group._get_backend(cpu()).name(), ddp._get_ddp_logging_data()["backend_name"], t.item()

        self.assertEqual(run(2, body, backend="cpu:muster"), [("cpu:muster", "muster", "muster", 2.0)] * 2)
        mixed = "cpu:muster,cuda:gloo"  # gloo stands in for NCCL, which CPU builds lack
        for whole, name, _, value in run(2, body, backend=mixed):
            self.assertEqual((whole, name, value), (mixed, "muster", 2.0))

    def test_beside_another_backend(self):
        def body(rank):
            gloo = dist.new_group(backend="gloo")
            t = torch.ones(2)
            dist.all_reduce(t)
            dist.all_reduce(t, group=gloo)
            return t.tolist()

        self.assertEqual(run(2, body, backend="cpu:muster"), [[4.0, 4.0]] * 2)

    def test_a_rank_outside_the_group_is_a_value_error(self):
        def body(_):
            return raised(ValueError, lambda: muster.create_backend(dist.HashStore(), 2, 2))

        self.assertIn("rank: expected 0 to 1 in a group of 2, got 2", fork(1, body)[0])


class Errors(unittest.TestCase):
    def test_wrong_arguments_are_value_errors_and_harm_nobody(self):
        def body(rank):
            t = torch.ones(3)
            text = raised(ValueError, lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3)))
            later = raised(ValueError, lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2), async_op=True))
            dist.all_reduce(t)
            return text, later, t.tolist()

        for text, later, values in run(2, body):
            self.assertIn("reduce_scatter", text)
            self.assertIn("all_gather", later)
            self.assertEqual(values, [2.0] * 3)

    def test_mismatch_says_what_each_rank_called(self):
        def body(rank):
            return raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(3 + rank)))

        for text in run(2, body):
            self.assertIn("rank 0 called all_reduce of 3 x Float, SUM", text)
            self.assertIn("rank 1 called all_reduce of 4 x Float, SUM", text)
            self.assertEqual(text.count("(backend_test.py:"), 2, text)  # where both called

    def test_is_a_runtime_error_from_wait_and_from_futures(self):
        def body(rank):
            work = dist.all_reduce(torch.ones(3 + rank), async_op=True)
            first = raised(dist.DistBackendError, work.wait)
            future = raised(dist.DistBackendError, work.get_future().wait)
            again = raised(RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
            return first, future, again

        for texts in run(2, body):
            for text in texts:
                self.assertIn("not the same on all ranks", text)

    def test_through_backward(self):
        def body(rank):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            loss = model(torch.ones(1, 4)).sum()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return raised(dist.DistBackendError, loss.backward)

        self.assertIn("rank 1 (pid", run(2, body)[0])


class Timeouts(unittest.TestCase):
    def test_of_the_group(self):
        def body(rank):
            if rank == 1:
                return raised(dist.DistBackendError, lambda: dist.barrier() if hear("0 timed out") else None)
            dist.distributed_c10d._get_default_group().set_timeout(timedelta(milliseconds=400))
            text = raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(4)))
            say("0 timed out")
            return text

        text = run(2, body)[0]
        self.assertIn(" Timed out waiting 400ms", text)
        self.assertIn("waiting for rank 1 (pid", text)

    def test_of_one_operation(self):
        def body(rank):
            if rank == 1:
                return raised(dist.DistBackendError, lambda: dist.barrier() if hear("0 timed out") else None)
            group = dist.distributed_c10d._get_default_group()
            options = dist.AllreduceOptions()
            options.timeout = timedelta(milliseconds=200)
            text = raised(RuntimeError, lambda: group.allreduce([torch.ones(1)], options).wait())
            say("0 timed out")
            return text

        self.assertIn("Timed out waiting 200ms", run(2, body)[0])

    def test_wait_with_a_limit_does_not_end_the_operation(self):
        def body(rank):
            group = dist.new_group(backend="gloo")
            t = torch.ones(1)
            if rank == 1:
                dist.barrier(group)
            work = dist.all_reduce(t, async_op=True)
            text = ""
            if rank == 0:
                text = raised(dist.DistBackendError, lambda: work.wait(timedelta(milliseconds=100)))
                dist.barrier(group)
            work.wait()
            return text, t.item()

        (text, first), (_, second) = run(2, body)
        self.assertIn("Operation timed out!", text)
        self.assertEqual((first, second), (2.0, 2.0))

    def test_of_a_rank_that_never_comes(self):
        def body(_):
            return raised(dist.DistBackendError,
                          lambda: muster.create_backend(dist.HashStore(), 0, 2, timedelta(milliseconds=300)))

        self.assertIn("rank(s) 1 of 2 did not come", fork(1, body)[0])

    def test_monitored_barrier_names_the_missing(self):
        def body(rank):
            muster.monitored_barrier()
            if rank in (1, 2):
                return hear("0 timed out")
            limit = timedelta(milliseconds=300)
            text = raised(dist.DistBackendError, lambda: muster.monitored_barrier(timeout=limit, wait_all_ranks=True))
            say("0 timed out")
            return text

        texts = run(3, body, destroy=False)
        self.assertIn("Ranks 1, 2 failed to pass monitoredBarrier in 300 ms", texts[0])
        self.assertIn("[Rank 0]", texts[0])

    def test_monitored_barrier_names_the_first_missing(self):
        def body(rank):
            if rank != 0:
                return hear("0 timed out")
            text = raised(RuntimeError, lambda: muster.monitored_barrier(timeout=timedelta(milliseconds=200)))
            say("0 timed out")
            return text

        self.assertIn("Rank 1 failed to pass monitoredBarrier", run(3, body, destroy=False)[0])

    def test_monitored_barrier_refuses_a_timeout_of_nothing(self):
        def body(rank):
            return raised(ValueError, lambda: muster.monitored_barrier(timeout=timedelta(0)))

        self.assertIn("above 0", run(1, body)[0])


class Ends(unittest.TestCase):
    def test_destroy_and_again_on_one_store(self):
        def body(rank):
            store = dist.FileStore(path, 2)
            values = []
            for _ in range(3):
                dist.init_process_group("muster", store=store, rank=rank, world_size=2)
                t = torch.ones(1)
                dist.all_reduce(t)
                values.append(t.item())
                sub = dist.new_group([0, 1])
                dist.all_reduce(t, group=sub)
                dist.destroy_process_group(sub)
                dist.destroy_process_group()
            return values

        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "store")
            self.assertEqual(fork(2, body), [[2.0] * 3] * 2)

    def test_a_destroyed_group_tells_those_who_need_it(self):
        def body(rank):
            if rank == 1:
                dist.destroy_process_group()
                return ""
            return raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(1)))

        self.assertIn("rank 1 left group", run(2, body, destroy=False)[0])

    def test_a_fork_of_a_rank_does_not_end_its_membership(self):
        def body(rank):
            dist.barrier()
            child = os.fork()
            if child == 0:
                dist.group.WORLD.abort()
                dist.destroy_process_group()
                muster._leave()
                os._exit(0)
            status = os.waitpid(child, 0)[1]
            t = torch.ones(1)
            dist.all_reduce(t)
            return status, t.item()

        for status, value in run(2, body):
            self.assertEqual(value, 2.0)
            self.assertEqual(status, 0)

    SCRIPT = """
import sys, torch, torch.distributed as dist, muster
rank = int(sys.argv[2])
dist.init_process_group("muster", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
group = dist.new_group([0, 1])
t = torch.ones(4)
work = dist.all_reduce(t, async_op=True)
work.wait()
work.get_future().then(lambda f: f.value())
dist.all_reduce(t, group=group)
if sys.argv[3] == "raise" and rank == 1:
    raise ValueError("a mistake in training")
if sys.argv[3] == "raise":
    dist.all_reduce(t)
print("value", t[0].item())
"""

    def pair(self, way):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [subprocess.Popen([sys.executable, "-c", self.SCRIPT, f"{folder}/store", str(rank), way], text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
            return [(*rank.communicate(timeout=60), rank.returncode) for rank in ranks]

    def test_exit_without_destroy_is_clean_and_quiet(self):
        self.assertEqual(self.pair("quiet"), [("value 4.0\n", "", 0)] * 2)

    def test_an_exception_ends_the_others_with_its_text(self):
        (_, zero, zero_status), (_, one, one_status) = self.pair("raise")
        self.assertEqual((zero_status, one_status), (1, 1))
        self.assertIn("a mistake in training", one)
        self.assertIn("DistBackendError", zero)
        self.assertIn("rank 1 ended: ValueError: a mistake in training", zero)


class Hosts(unittest.TestCase):
    def test_ranks_on_several_hosts(self):
        """Fakes two hosts: ranks with different values of MUSTER_HOST do not share memory."""
        def body(rank):
            os.environ["MUSTER_HOST"] = "aab"[rank]
            dist.init_process_group("muster", store=dist.FileStore(f"{folder}/store", 3), rank=rank, world_size=3,
                                    timeout=timedelta(seconds=30))
            t, parts, objects = torch.full((4000,), float(rank)), [torch.zeros(2) for _ in range(3)], [None] * 3
            dist.all_reduce(t)
            dist.all_gather(parts, torch.full((2,), float(rank)))
            dist.all_gather_object(objects, {"rank": rank})
            if rank == 2:
                dist.send(t, 0)
            elif rank == 0:
                dist.recv(t, 2)
            dist.barrier()
            dist.destroy_process_group()
            return t[-1].item(), [part[0].item() for part in parts], objects

        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(fork(3, body), [(3.0, [0.0, 1.0, 2.0], [{"rank": r} for r in range(3)])] * 3)

    def test_mismatch_between_hosts_says_where_each_rank_called(self):
        for hosts in ("ab", "aab"):
            last = len(hosts) - 1

            def body(rank):
                os.environ["MUSTER_HOST"] = hosts[rank]
                dist.init_process_group("muster", store=dist.FileStore(f"{folder}/store", len(hosts)), rank=rank,
                                        world_size=len(hosts), timeout=timedelta(seconds=LIMIT))
                return raised(dist.DistBackendError, lambda: dist.all_reduce(torch.ones(3 + (rank == last))))

            with tempfile.TemporaryDirectory() as folder:
                for text in fork(len(hosts), body):
                    self.assertIn("rank 0 called all_reduce of 3 x Float, SUM (backend_test.py:", text)
                    self.assertIn(f"rank {last} called all_reduce of 4 x Float, SUM (backend_test.py:", text)


class Stragglers(unittest.TestCase):
    def test_who_comes_last_is_named(self):
        """Rank 1 comes a second after rank 0, which by then sleeps in the collective."""
        def body(rank):
            group = dist.new_group()
            nobody = muster.straggler_report(group)
            if rank == 0:
                dist.distributed_c10d._get_default_store().set("pid", str(os.getpid()))
            else:
                await_sleep(int(dist.distributed_c10d._get_default_store().get("pid")))
                time.sleep(1.1)  # what is measured
            dist.all_reduce(torch.ones(3), group=group)
            known = muster.straggler_report(group), muster.straggler_report(group, timedelta(hours=1))
            world = muster.straggler_report()
            with tempfile.TemporaryFile() as log:
                stderr = os.dup(2)
                os.dup2(log.fileno(), 2)
                dist.destroy_process_group(group)
                os.dup2(stderr, 2)
                log.seek(0)
                said = log.read().decode()
            return nobody, *known, world, said

        words = "rank 1 came last to 100 % of 1 collectives of group '"
        for rank, (nobody, known, not_that_late, world, said) in enumerate(run(2, body)):
            self.assertEqual((nobody, not_that_late, world), ("", "", ""))
            self.assertIn(words, known)
            self.assertEqual(words in said, rank == 0, said)  # at the end of the group

    def test_of_another_backend(self):
        def body(_):
            group = dist.new_group(backend="gloo")
            answer = raised(ValueError, lambda: muster.straggler_report(group))
            dist.barrier()  # gloo's other rank may still be connecting to this one
            return answer

        for text in run(2, body):
            self.assertIn("the group's backend is 'gloo', not 'muster'", text)


class Threads(unittest.TestCase):
    def test_a_backend_may_go_with_an_operation_under_way(self):
        def rank_threads(_):
            store = dist.HashStore()

            def one(rank):
                backend = muster.create_backend(store, rank, 2, timedelta(seconds=LIMIT))
                if rank == 0:
                    # Only the operation holds the tensor, which a thread of Muster releases while this one waits for it.
                    backend.allreduce([torch.ones(3)])
                    del backend
                else:
                    raised(dist.DistBackendError, lambda: backend.barrier().wait())

            threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        for _ in range(5):
            fork(1, rank_threads)

    def test_groups_leave_no_keys_in_the_store(self):
        def rank_threads(_):
            store, n, keys = dist.HashStore(), 3, []

            def one(rank):
                muster.create_backend(store, rank, n, timedelta(seconds=LIMIT)).barrier().wait()

            for _ in range(4):
                threads = [threading.Thread(target=one, args=(rank,)) for rank in range(n)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                keys.append(store.num_keys())
            return keys

        keys = fork(1, rank_threads)[0]
        self.assertEqual(keys, [keys[0]] * 4)

    def test_collectives_and_messages(self):
        def body(rank, backend):
            t = torch.full((5,), float(rank))
            backend.allreduce([t]).wait()
            got = torch.zeros(1)
            work = backend.recv([got], (rank + 2) % 3, 0)
            backend.send([torch.full((1,), float(rank))], (rank + 1) % 3, 0).wait()
            work.wait()
            return t.tolist(), got.item()

        self.assertEqual(run_threads(3, body), [([3.0] * 5, 2.0), ([3.0] * 5, 0.0), ([3.0] * 5, 1.0)])

    def test_a_thread_that_ends_is_missed(self):
        def body(rank, backend):
            if rank == 1:
                del backend
                return ""
            return raised(dist.DistBackendError, lambda: backend.allreduce([torch.ones(1)]).wait())

        self.assertIn("rank 1 left group", run_threads(2, body)[0])


if __name__ == "__main__":
    unittest.main(verbosity=2)
