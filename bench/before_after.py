#!/usr/bin/env python3
"""Compares two builds of Muster row by row: did a change that was to change no figure change one?

    bench/before_after.py BEFORE NOW [--json FILE] [--rounds 7] [--only collectives,crowd,rpc,autograd,meta,ddp]
                                     [--jobs 1] [--crowd RANKS] [--ops OP,…] [--sizes BYTES,…]

BEFORE and NOW are the folders of two builds (build/release of two checkouts). Both are measured in turns, and NOW twice
in each round: its second measurement differs from the first by noise alone. A row's ratio is before / now of a time,
and now / before of a speed, so above 1 the later build is faster; it is the median of the rounds' ratios. Its noise is
the median of |1 - again / now| over the rounds, and "slower" marks a row that lost more than three times that and 3 %.
The rounds of a collective have the same three jobs, --jobs times. Two jobs of one build were up to 6 % apart at 16
bytes, and 40 % with four ranks on two cores, always in the same direction: believe a difference only if several jobs
agree on it.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

from rounds import Server, measure_round
from run import machine
from runner import Runner, output_of

OPS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = (16, 4 << 10, 64 << 10, 256 << 10, 4 << 20)
TIMES, SPEEDS = ("us", "ms"), ("per_s", "samples_per_s")
PROGRAMS = {"rpc": ((2, "bench_rpc"),), "autograd": ((2, "bench_autograd"),),
            "meta": ((1, "bench_meta"), (2, "bench_meta")), "ddp": ((2, "bench_ddp", "--net", "small"),)}


def figure(row):
    """Returns a row's name and its figure, the smaller the better; none if it has no figure of time or speed."""
    name = tuple(sorted((key, value) for key, value in row.items()
                        if key in ("op", "bytes", "case", "impl", "net", "ranks", "what")))
    for unit in (*TIMES, *SPEEDS):
        if row.get(unit):
            return name, row[unit] if unit in TIMES else 1 / row[unit]
    return name, None


class Comparison:
    def __init__(self, args):
        self.args = args
        self.sides = {side: Runner(argparse.Namespace(build=build, ranks=2)) for side, build in
                      (("now", args.now), ("before", args.before), ("again", args.now))}

    def turns(self):
        """The order of the sides in each round. It rotates, so that no side gains by its place."""
        sides = list(self.sides)
        return [sides[i % 3:] + sides[:i % 3] for i in range(self.args.rounds)]

    def collectives(self, ranks=2):
        """All sizes of all operations, in rounds of the machine's fast state."""
        cases = [(op, size) for op in self.args.ops if ranks == 2 or op != "send_recv" for size in self.args.sizes]
        if set(OPS) <= set(self.args.ops):
            cases.append(("barrier", 8))
        rounds = {case: [] for case in cases}
        for _ in range(self.args.jobs):
            servers = {}
            try:
                for side, runner in self.sides.items():
                    servers[side] = Server(runner.job("bench_collectives", "--serve", ranks=ranks), ranks, runner.env)
                for case, taken in rounds.items():
                    for sides in self.turns():
                        found, _, _ = measure_round([servers[side] for side in sides], self.sides["now"].reference, *case)
                        taken.append(dict(zip(sides, found)))
            finally:
                for server in servers.values():
                    server.close()
        return [row for taken in rounds.values() for row in self.compared("collectives", taken)]

    def crowd(self):
        """The same for more ranks than two."""
        return self.collectives(ranks=self.args.crowd)

    def programs(self, bench):
        taken = []
        for sides in self.turns():
            found = {}
            for side in sides:
                runner = self.sides[side]
                found[side] = [row for ranks, *program in PROGRAMS[bench]
                               for row in output_of(runner.job(*program, ranks=ranks), runner.env)]
            taken.append(found)
        return self.compared(bench, taken)

    def compared(self, bench, taken):
        by_name = {}
        for found in taken:
            figures = {side: {name: value for name, value in map(figure, rows) if value}
                       for side, rows in found.items()}
            for name in figures["now"]:
                if name in figures["before"]:
                    by_name.setdefault(name, []).append(tuple(figures[side][name] for side in self.sides))
        rows = []
        for name, rounds in by_name.items():
            ratio = statistics.median(before / now for now, before, _ in rounds)
            noise = statistics.median(abs(1 - again / now) for now, _, again in rounds)
            row = {"bench": "before_after", "of": bench, **dict(name), "rounds": len(rounds), "ratio": round(ratio, 3),
                   "noise": round(noise, 3), "slower": 1 - ratio > max(3 * noise, 0.03)}
            print(f"{' '.join(f'{value}' for _, value in name):60} {row['ratio']:6.3f}  noise {row['noise']:.3f}"
                  f"{'  SLOWER' if row['slower'] else ''}", flush=True)
            rows.append(row)
        return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("now")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file, one object per line")
    parser.add_argument("--only", default="collectives,crowd,rpc,autograd,meta,ddp")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=1, help="how often the jobs of collectives start anew (default: %(default)s)")
    parser.add_argument("--crowd", type=int, default=4, metavar="RANKS", help="how many ranks crowd has")
    parser.add_argument("--ops", type=lambda text: text.split(","), default=OPS, help="collectives and messages")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")], default=SIZES)
    args = parser.parse_args()
    comparison = Comparison(args)
    rows = []
    for bench in args.only.split(","):
        rows += comparison.programs(bench) if bench in PROGRAMS else getattr(comparison, bench)()
    slower = sum(row["slower"] for row in rows)
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
    print(f"{len(rows)} rows, {slower} slower; geometric mean of the ratios {mean:.3f}")
    if args.json:
        Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in [machine(), *rows]))


if __name__ == "__main__":
    main()
