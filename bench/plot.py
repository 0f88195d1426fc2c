#!/usr/bin/env python3
"""Draws the time of a collective over its size, a line per implementation, from the rows that bench/run.py --json wrote.

    bench/plot.py ROWS.jsonl PICTURE.svg [--op all_reduce] [--bandwidth]

--bandwidth draws the size divided by the time instead; of a message (send_recv), whose time is that of a round trip,
twice the size. Both axes are logarithmic. The script needs nothing but Python.
"""

import argparse
import json
import math
from pathlib import Path
from xml.sax.saxutils import escape

from tables import size

NAMES = {"muster-heap": ("Muster, tensor on the heap", "#0b7a4b"), "muster": ("Muster, any tensor", "#2a9d8f"),
         "openmpi": ("Open MPI", "#c8553d"), "mpich": ("MPICH", "#e9a23b"), "intelmpi": ("Intel MPI", "#3b6fb5"),
         "gloo": ("Gloo (PyTorch)", "#8d6a9f"), "floor": ("memory traffic alone", "#999999")}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 30, 44, 52


def duration(us):
    return f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} µs"


def bandwidth(mb_per_s):
    return f"{mb_per_s / 1000:g} GB/s" if mb_per_s >= 1000 else f"{mb_per_s:g} MB/s"


def draw(title, machine, lines, show):
    points = [point for line in lines.values() for point in line]
    x_low, x_high = (math.log2(f(n for n, _ in points)) for f in (min, max))
    y_low, y_high = math.floor(math.log10(min(us for _, us in points))), math.ceil(math.log10(max(us for _, us in points)))

    def x(n):
        return LEFT + (math.log2(n) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y(us):
        return HEIGHT - BOTTOM - (math.log10(us) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
           f'<text x="{LEFT}" y="22" font-size="15" fill="#222">{escape(title)}</text>',
           f'<text x="{LEFT}" y="37" fill="#666">{escape(machine)}</text>']
    for power in range(y_low, y_high + 1):
        at = y(10.0 ** power)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#444">{show(10.0 ** power)}</text>')
    for n in sorted({n for n, _ in points}):
        out.append(f'<text x="{x(n):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#444">{size(n)}</text>')
    for row, (impl, line) in enumerate(lines.items()):
        name, colour = NAMES.get(impl, (impl, "#444444"))
        dash = ' stroke-dasharray="5 4"' if impl == "floor" else ""
        path = " ".join(f"{x(n):.1f},{y(us):.1f}" for n, us in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2"{dash}/>')
        if not dash:
            out += [f'<circle cx="{x(n):.1f}" cy="{y(us):.1f}" r="3" fill="{colour}"/>' for n, us in line]
        at = TOP + 16 + 18 * row
        out.append(f'<line x1="{LEFT + 14}" x2="{LEFT + 40}" y1="{at}" y2="{at}" stroke="{colour}" stroke-width="2.2"{dash}/>')
        out.append(f'<text x="{LEFT + 48}" y="{at + 4}" fill="#222">{escape(name)}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("picture")
    parser.add_argument("--op", default="all_reduce")
    parser.add_argument("--bandwidth", action="store_true")
    args = parser.parse_args()
    rows = [json.loads(line) for line in Path(args.rows).read_text().splitlines()]
    chosen = [row for row in rows if row.get("bench") == "collectives" and row["op"] in (args.op, "floor")]
    if not any(row["op"] == args.op for row in chosen):
        parser.error(f"{args.rows} has no rows of {args.op}")
    lines = {impl: sorted((row["bytes"], row["us"]) for row in chosen if row["impl"] == impl) for impl in NAMES}
    title, show = f"{args.op}: time of a {'round trip' if args.op == 'send_recv' else 'call'} over size", duration
    if args.bandwidth:
        ways = 2 if args.op == "send_recv" else 1
        lines = {impl: [(n, ways * n / us) for n, us in line] for impl, line in lines.items()}  # bytes per µs are MB/s
        title, show = f"{args.op}: bandwidth over size", bandwidth
    machine = next((row for row in rows if row["bench"] == "machine"), {})
    ranks = chosen[0]["ranks"]
    words = f"{ranks} ranks on {machine.get('cores', '?')} cores, {machine.get('cpu', 'unknown processor')}, {machine.get('date', '')}; float32"
    Path(args.picture).write_text(draw(title, words, {impl: line for impl, line in lines.items() if line}, show))


if __name__ == "__main__":
    main()
