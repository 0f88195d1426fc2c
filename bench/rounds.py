"""Measures implementations beside each other on a machine whose speed changes.

A virtual machine has faster and slower states, which last for seconds: a copy of 256 KiB from one core to another takes
20 us in one and 70 us in another. The best of a few rounds would compare states, not implementations. So

  - all implementations are started once, as Servers, and stopped (SIGSTOP) while another one is measured;
  - a case (an operation and a size) is measured with one implementation immediately after the other, in each round;
  - a Reference, the time of such a copy, is taken before and after each row. A round that has a row from a slow state
    is repeated, up to REPEATS times;
  - a case that was measured in a slow state, as the fastest copy of the whole run shows, is measured again at the end;
  - a ratio is taken within a round. The median of the rounds' ratios counts.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import tempfile

SLOW = 1.5  # a reference copy that takes so many times the fastest one's time says "slow"
REPEATS = 6  # of a round in a slow state, before it is taken as it is


class Server:
    """A job whose rank 0 reads "OP BYTES" and prints rows, then {"done": true}. See bench/collectives.cpp."""

    def __init__(self, command, ranks, env=None):
        self.command = command
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.pids, self.said = [], []
        while len(self.pids) < ranks:
            self.pids.append(self._line()["pid"])
        self._signal(signal.SIGSTOP)

    def _line(self):
        while not self.said:
            line = self.process.stdout.readline()
            if not line:
                self._ended()
            # The ranks share a pipe, and a launcher may join what two of them print.
            self.said = [json.loads(text) for text in re.findall(r"\{[^{}]*\}", line)]
        return self.said.pop(0)

    def _ended(self):
        status = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read()[-2000:]
        self._close_files()
        raise RuntimeError(f"{' '.join(self.command)} ended with status {status}:\n{said}")

    def _close_files(self):
        for file in (self.process.stdin, self.process.stdout, self.errors):
            file.close()

    def _signal(self, number):
        for pid in self.pids:
            os.kill(pid, number)

    def ask(self, op, size):
        """Returns the rows of a case."""
        self._signal(signal.SIGCONT)
        self.process.stdin.write(f"{op} {size}\n")
        self.process.stdin.flush()
        rows = []
        while "done" not in (line := self._line()):
            rows.append(line)
        self._signal(signal.SIGSTOP)
        return rows

    def close(self):
        self._signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._close_files()


class Reference:
    """The time of a copy between cores (bench/reference.cpp), and the fastest one seen."""

    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.fastest = None
        for _ in range(20):
            self.take()

    def take(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if answer == "none":
            return None
        us = float(answer)
        self.fastest = min(us, self.fastest or us)
        return us

    def is_slow(self, us):
        return us is not None and us > SLOW * self.fastest
        self.process.stdout.close()


def measure_round(servers, reference, op, size):
    """Returns the rows of a case by server, the slowest reference copy before, between and after them, and whether that
    is of a slow state. Such a round is repeated, up to REPEATS times."""
    for _ in range(REPEATS):
        rows, copies = [], [reference.take()]
        for server in servers:
            rows.append(server.ask(op, size))
            copies.append(reference.take())
        slowest = max((us for us in copies if us is not None), default=None)
        if not reference.is_slow(slowest):
            return rows, slowest, False
    return rows, slowest, True


def is_ours(impl):
    return impl.startswith("muster")


def measure_case(servers, reference, op, size, rounds):
    """Returns one row per implementation: the median of its times, and for ours the median of the rounds' ratios to the fastest peer."""
    times, ratios, shown, slowest, slow_rounds = {}, {}, {}, None, 0
    for _ in range(rounds):
        by_server, copy, is_slow = measure_round(servers, reference, op, size)
        rows = [row for of_server in by_server for row in of_server]
        slow_rounds += is_slow
        slowest = max((us for us in (slowest, copy) if us is not None), default=None)
        us = {row["impl"]: row["us"] for row in rows}
        shown.update((row["impl"], row) for row in rows)
        for impl, value in us.items():
            times.setdefault(impl, []).append(value)
        peers = {impl: value for impl, value in us.items() if not is_ours(impl) and impl != "floor"}
        for impl in us:
            if peers and is_ours(impl):
                ratios.setdefault(impl, []).append(min(peers.values()) / us[impl])
    out = []
    for impl, values in times.items():
        row = dict(shown[impl], us=round(statistics.median(values), 3), rounds=rounds)
        if impl in ratios:
            row["ratio"] = round(statistics.median(ratios[impl]), 2)
        if slowest is not None:
            row["copy_us"] = round(slowest, 1)
        if slow_rounds:
            row["slow_rounds"] = slow_rounds
        out.append(row)
    return out


def measure_cases(servers_of, reference, cases, rounds):
    """Returns the rows of all cases, (op, bytes), in their order. `servers_of(op)`: who measures it. A machine that is slow
    at first looks fast until a faster copy has been seen; so, at the end, cases whose slow state was not noticed are
    measured once more."""
    found = {(op, size): measure_case(servers_of(op), reference, op, size, rounds) for op, size in cases}
    for (op, size), rows in found.items():
        if reference.is_slow(rows[0].get("copy_us")) and "slow_rounds" not in rows[0]:
            found[op, size] = measure_case(servers_of(op), reference, op, size, rounds)
            for row in found[op, size]:
                if reference.is_slow(row.get("copy_us")):
                    row.setdefault("slow_rounds", rounds)
    return [row for rows in found.values() for row in rows]
