#!/usr/bin/env python3
"""bench/rounds.py compares implementations within a round, and repeats rounds of the machine's slow state."""

import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
from rounds import REPEATS, Server, measure_case, measure_cases  # noqa: E402


class FakeServer:
    """Answers with the next of its times for each case; every time is in us."""

    def __init__(self, impls, times):
        self.impls, self.times = impls, list(times)

    def ask(self, op, size):
        us = self.times.pop(0)
        return [{"impl": impl, "op": op, "bytes": size, "us": us * factor} for impl, factor in self.impls.items()]


class FakeReference:
    def __init__(self, slow_takes=()):
        self.taken, self.slow_takes = 0, set(slow_takes)

    def take(self):
        self.taken += 1
        return 70.0 if self.taken in self.slow_takes else 20.0

    def is_slow(self, us):
        return us > 30


class Rounds(unittest.TestCase):
    def test_a_ratio_is_taken_within_a_round(self):
        # Both are three times slower in the second round. The best times alone would say 1.0.
        ours, peer = FakeServer({"muster": 1}, [10, 30, 12]), FakeServer({"openmpi": 1}, [20, 60, 10])
        rows = {row["impl"]: row for row in measure_case([ours, peer], FakeReference(), "all_reduce", 16, 3)}
        self.assertEqual(rows["muster"]["ratio"], 2.0)
        self.assertEqual(rows["muster"]["us"], 12)
        self.assertEqual(rows["openmpi"]["us"], 20)
        self.assertNotIn("ratio", rows["openmpi"])

    def test_the_fastest_peer_counts_and_the_floor_is_no_peer(self):
        ours = FakeServer({"muster": 1, "muster-heap": 0.5, "floor": 0.1}, [10])
        peers = [FakeServer({"openmpi": 1}, [40]), FakeServer({"intelmpi": 1}, [20])]
        rows = {row["impl"]: row for row in measure_case([ours, *peers], FakeReference(), "all_reduce", 16, 1)}
        self.assertEqual((rows["muster"]["ratio"], rows["muster-heap"]["ratio"]), (2.0, 4.0))

    def test_a_slow_round_is_repeated(self):
        # Three copies per round. The second round meets the slow state in the middle.
        ours, peer = FakeServer({"muster": 1}, [10, 99, 10]), FakeServer({"openmpi": 1}, [20, 99, 20])
        rows = {row["impl"]: row for row in measure_case([ours, peer], FakeReference({5}), "all_reduce", 16, 2)}
        self.assertEqual((rows["muster"]["us"], rows["muster"]["ratio"]), (10, 2.0))
        self.assertEqual(rows["muster"]["copy_us"], 20.0)
        self.assertNotIn("slow_rounds", rows["muster"])

    def test_a_machine_that_stays_slow_is_reported(self):
        ours = FakeServer({"muster": 1}, [10] * REPEATS)
        row, = measure_case([ours], FakeReference(range(1, 1000)), "all_reduce", 16, 1)
        self.assertEqual((row["slow_rounds"], row["copy_us"]), (1, 70.0))

    def test_a_case_of_a_slow_state_that_was_not_known_yet_is_measured_again(self):
        class Reference:  # the machine becomes fast after the first case
            takes, fastest = [70.0] * 2 + [20.0] * 100, 70.0

            def take(self):
                us = self.takes.pop(0)
                self.fastest = min(self.fastest, us)
                return us

            def is_slow(self, us):
                return us > 1.5 * self.fastest

        ours = FakeServer({"muster": 1}, [30, 12, 10])
        rows = measure_cases(lambda op: [ours], Reference(), [("broadcast", 16), ("all_gather", 16)], 1)
        self.assertEqual([(row["op"], row["us"], row["copy_us"]) for row in rows],
                         [("broadcast", 10, 20.0), ("all_gather", 12, 20.0)])

    def test_a_server_is_stopped_while_it_is_not_asked(self):
        program = """
import json, os
print(json.dumps({"pid": os.getpid()}), flush=True)
while True:
    try:
        op, size = input().split()
    except EOFError:
        break
    print(json.dumps({"op": op, "bytes": int(size), "impl": "x", "us": 1.5}), json.dumps({"done": True}), sep="\\n", flush=True)
"""
        server = Server([sys.executable, "-c", program], 1)
        self.assertEqual(server.ask("broadcast", 64), [{"op": "broadcast", "bytes": 64, "impl": "x", "us": 1.5}])
        self.assertEqual(len(server.ask("broadcast", 64)), 1)
        server.close()
        self.assertEqual(server.process.returncode, 0)

    def test_a_server_that_ends_early_says_why(self):
        with self.assertRaisesRegex(RuntimeError, "status 3:\nno such backend"):
            Server([sys.executable, "-c", "import sys; print('no such backend', file=sys.stderr); sys.exit(3)"], 1)


if __name__ == "__main__":
    unittest.main()
