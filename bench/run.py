#!/usr/bin/env python3
"""Runs Muster's benchmarks and the peers' in one go and prints them side by side.

    bench/run.py --build build/release [--json FILE] [--ranks 2] [--rounds 3]
                 [--only all_reduce,messages,others,ddp,buckets,ddp_memory,ddp_construction,ddp_watch,ddp_share,zero,
                         slow_link,sync_batch_norm,launch,recovery,snapshot,crowd,pinned,rpc,transport,autograd,optim,
                         optimizers,meta,fsdp,embedding,hosts,hosts_collectives,limit,fault,idle,memory,copy]

The implementations take turns, `rounds` times, so that a noisy minute affects all of them. Of collectives and messages
the median of the rounds' ratios to the fastest peer counts, from rounds in the machine's fast state (bench/rounds.py);
of the others, the best round of each row. A peer that is not installed is left out, and the output says so. fault,
idle, memory and copy have no peers: each figure stands beside the bound that Muster promises, as do some of launch,
ddp_memory, ddp_watch and sync_batch_norm.
--json writes one object per line, after a first line about the machine.
"""
# suites.py and training_suites.py say what each benchmark runs, runner.py starts programs, tables.py prints the rows,
# rounds.py compares collectives within a round, and sandbox.py makes two hosts, or a small one, out of this machine.

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from runner import HERE
from suites import Suites
from tables import SHOW


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {"bench": "machine", "date": date.today().isoformat(), "cpu": said.get("model name", "unknown"),
            "family": said.get("cpu family"), "model": said.get("model"), "cores": os.cpu_count(),
            "kernel": platform.release()}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=str(HERE.parent / "build" / "release"), help="where Muster was built")
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file, one object per line")
    parser.add_argument("--picture", metavar="FILE",
                        help="with --json: draw all_reduce's time over size in this file (bench/plot.py)")
    parser.add_argument("--only", default="all_reduce,messages,others,ddp,launch,recovery,fault,idle,memory",
                        help="which benchmarks, separated by commas")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.chosen = args.only.split(",")
    if unknown := [name for name in args.chosen if name not in SHOW]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(SHOW)}")
    return args


def main():
    args = arguments()
    suites = Suites(args)
    rows, failed = [machine()], []
    print(f"{rows[0]['cpu']}, {rows[0]['cores']} cores, {args.ranks} ranks, {args.rounds} rounds")
    for name in args.chosen:
        start = time.monotonic()
        try:
            found = getattr(suites, name)()
        except RuntimeError as error:  # a program failed; the other benchmarks go on
            failed.append(name)
            print(f"{name}: {error}")
            continue
        rows += found
        if args.json:  # after each, so that no measurement is lost
            Path(args.json).write_text("".join(json.dumps(row) + "\n" for row in rows))
        SHOW[name](found)
        print(f"{name} took {time.monotonic() - start:.0f} s")
    for impl, why in suites.missing.items():
        print(f"\nleft out: {impl} ({why})")
    if args.json and len(rows) > 1:
        print(f"\nrows written to {args.json}")
        if args.picture:
            subprocess.run([sys.executable, str(HERE / "plot.py"), args.json, args.picture], check=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
