#!/usr/bin/env python3
"""The tables in the documents whose figures are rows of bench/results/ say what the rows say.

Such a table has a mark directly above it, from which this check computes each cell again:

    <!-- rows: bench/results/FILE.jsonl [bench/results/FILE.jsonl …]
    each: us op=all_reduce
    columns: impl=muster | impl=gloo | impl=gloo over impl=muster
    lines: bytes=16 | bytes=4096 -->
    | | Muster | Gloo | faster |

`each`, a column and a line describe a cell together. If two of them contradict each other, the later one counts. A word
with `=` chooses rows: `file=` is a file's name without `.jsonl`, and a value with spaces stands in quotes. A word without
`=` names the field. `A over B` is a quotient. `A and B` are two figures in one cell. `-` stands for a column or line that
is not from rows. `columns: bytes` and `lines: bytes` take the sizes from the labels. A line may describe its columns one
by one, separated by `;`. Two words more are optional:

    of: min      (max, last) which of several rows counts; without it there must be exactly one
    unit: ms     the unit of figures that show none; without it, the field's

A figure may differ from the rows by half a unit of its last digit. A cell without a figure is left alone.
"""
import json
import re
import shlex
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARKED = ["README.md", "docs/algorithms.md", "docs/snapshots.md",
          "docs/decisions/0010-a-collective-returns-when-all-have-entered-it.md"]  # these pages must have a mark
MARK = re.compile(r"^<!-- rows:(.*?)-->\n((?:\|[^\n]*\n?)*)", re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*)(\.\d+)?(?:\s*(ns|µs|ms|s|%|million))?(?![\wµ])")
UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1, "%": 1e-2, "million": 1e6}
FIELDS = {"us": 1e-6, "microseconds": 1e-6, "ms": 1e-3}  # the units of these fields; others have none
CHOICES = {"": lambda values: values[0], "min": min, "max": max, "last": lambda values: values[-1]}


def figures_of(text):
    """A list of figures. Each is a list of one description, or of two: dividend and divisor."""
    return [[dict(word.split("=", 1) if "=" in word else ("field", word) for word in shlex.split(part))
             for part in figure.split(" over ")] for figure in text.split(" and ")]


def spread(parts, count, what):
    """As many parts as there are places. One part stands for all."""
    if len(parts) not in (1, count):
        raise ValueError(f"{len(parts)} {what} are described, there are {count}")
    return parts * count if len(parts) == 1 else parts


def joined(one, other, join):
    count = max(len(one), len(other))
    return [join(a, b) for a, b in zip(spread(one, count, "figures"), spread(other, count, "figures"))]


def together(one, other):
    """The figures that two texts describe together."""
    return joined(one, other, lambda a, b: joined(a, b, lambda x, y: {**x, **y}))


def recorded(figure, rows, choice, unit):
    """What the rows have for a figure, in the unit, or in the rows' own."""
    values = []
    for description in figure:
        keys = dict(description)
        field = keys.pop("field", None)
        found = [row[field] for row in rows if field in row and all(str(row.get(key)) == keys[key] for key in keys)]
        if not found or (len(found) > 1 and not choice):
            raise ValueError(f"{len(found)} rows have {field}, {', '.join(map('='.join, keys.items()))}")
        values.append(CHOICES[choice](found) * (FIELDS.get(field, 1) if unit or len(figure) > 1 else 1))
    return (values[0] / values[1] if len(values) > 1 else values[0]) / UNITS.get(unit, 1)


def descriptions(text, labels, what):
    if text == "bytes":
        return [f"bytes={int(number) << {'B': 0, 'KiB': 10, 'MiB': 20}[unit]}" for number, unit in map(str.split, labels)]
    return spread([part.strip() for part in text.split("|")], len(labels), what)


def wrong_cells(mark, table, number):
    """Yields (number of the line, what is wrong) for a table that begins in line `number`."""
    files, *words = re.split(r"\n *(each|columns|lines|of|unit):", mark)
    words = {"each": "", "of": "", "unit": ""} | {key: " ".join(text.split()) for key, text in zip(words[::2], words[1::2])}
    rows = [dict(json.loads(line), file=Path(name).stem)
            for name in files.split() for line in (ROOT / name).read_text().splitlines()]
    labels, _, *lines = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in table.splitlines()]
    columns = descriptions(words["columns"], labels[1:], "columns")
    texts = descriptions(words["lines"], [line[0] for line in lines], "lines")
    for place, (line, text) in enumerate(zip(lines, texts), number + 2):
        own_texts = spread([part.strip() for part in text.split(";")], len(columns), "columns of a line")
        for cell, label, column, own in zip(line[1:], labels[1:], columns, own_texts):
            shown = FIGURE.findall(cell)
            if not shown or "-" in (column, own):
                continue
            figures = together(together(figures_of(words["each"]), figures_of(column)), figures_of(own))
            for (whole, fraction, unit), figure in zip(shown, spread(figures, len(shown), f"figures of '{cell}'")):
                value = recorded(figure, rows, words["of"], unit or (words["unit"] if len(figure) == 1 else ""))
                if abs(float(whole.replace(",", "") + fraction) - value) > 0.50001 * 10.0 ** -max(len(fraction) - 1, 0):
                    yield place, f"'{line[0]}', '{label}': it says {whole}{fraction}, the rows say {value:.6g}"


def wrong_in(text):
    """What is wrong with a page, (line, what) each, and how many marks it has."""
    found = [(1, f"there is no {name}") for name in re.findall(r"bench/results/[\w.-]*\w", text) if not (ROOT / name).exists()]
    visible = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    marks = list(MARK.finditer(text))
    for mark in marks:
        number = text[:mark.start(2)].count("\n") + 1
        files = re.findall(r"[\w.-]+\.jsonl", mark[1])
        found += [(number, f"the text does not name {name}") for name in files if name not in visible]
        try:
            found += wrong_cells(mark[1], mark[2], number)
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            found.append((number, f"the mark does not fit the table: {error}"))
    return found, len(marks)


PAGE = """2026-11-24-epyc-2-cores.jsonl

<!-- rows: bench/results/2026-11-24-epyc-2-cores.jsonl
each: us op=all_reduce
columns: impl=muster | impl=gloo | impl=gloo over impl=muster
lines: bytes -->
| | Muster | Gloo | faster |
|---|---|---|---|
| 16 B | 0.18 µs | 613 µs | 3,424× |
| 4 KiB | 471 ns | 0.578 ms | 1,227× |
"""


class Figures(unittest.TestCase):
    def test_the_documents_say_what_the_rows_say(self):
        pages = [ROOT / "README.md", ROOT / "python" / "README.md", *(ROOT / "docs").rglob("*.md")]
        found = {str(page.relative_to(ROOT)): wrong_in(page.read_text()) for page in pages}
        wrong = [f"{name}:{line}: {what}" for name, (problems, _) in found.items() for line, what in problems]
        self.assertTrue(not wrong, "\n" + "\n".join(wrong))
        self.assertEqual([name for name in MARKED if not found[name][1]], [], "pages without a mark")

    def test_what_differs_is_found(self):
        self.assertEqual(wrong_in(PAGE), ([], 1))
        for change in ("0.18/0.19", "613/612", "3,424/3,423", "471 ns/471 µs", "0.578 ms/578 and 1", "4 KiB/8 KiB", "4 KiB/4",
                       ": bytes/: bytes=8", ": bytes/: bytes=16 | bytes=16 | -", "gloo |/gluo |", "us op/ms op",
                       "cores.jsonl\n\n/cores\n\n", "cores.jsonl\neach/gone.jsonl\neach"):
            self.assertNotEqual(wrong_in(PAGE.replace(*change.split("/"), 1))[0], [], change)


if __name__ == "__main__":
    unittest.main()
