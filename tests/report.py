#!/usr/bin/env python3
"""Prints what ctest's summary lacks: how many tests ran, which skipped, were slow, or passed only when repeated.

    report.py BUILD CTEST_OUTPUT

BUILD is the folder in which ctest ran. Its LastTest.log has the output of every run of every test. If a test failed and
then passed when ctest repeated it, this prints "UNSTABLE: name" and writes the logs of both runs to BUILD/unstable/.
The last line repeats ctest's own verdict.
"""

import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

RUN = re.compile(r"^\d+/\d+ Testing: (?P<name>.*?)\n(?P<text>.*?)^\"(?P=name)\" time elapsed:.*?$", re.MULTILINE | re.DOTALL)
TIME = re.compile(r"^Test time = +([\d.]+) sec$", re.MULTILINE)


class Run:
    def __init__(self, name, text):
        self.name, self.text = name, text
        self.passed = "\nTest Passed.\n" in text
        self.seconds = float(TIME.findall(text)[-1]) if TIME.search(text) else 0.0

    def cases(self):
        """Returns how many gtest or unittest tests this run ran."""
        counts = re.findall(r"^\[==========\] (\d+) tests? from .* ran\.", self.text, re.MULTILINE)
        return sum(map(int, counts or re.findall(r"^Ran (\d+) tests? in ", self.text, re.MULTILINE) or [1]))

    def skipped(self):
        """Yields (test, reason) for each gtest test that skipped."""
        for reason, test in re.findall(r"Skipped\n(.*?)\n\n?\[  SKIPPED \] (\S+)", self.text):
            yield test, reason


def runs_of(log):
    return [Run(match["name"], match["text"]) for match in RUN.finditer(log)]


def compilation(ninja_log):
    """Returns the seconds of compilation per target, from each file's latest build. ccache's files count as copying took."""
    seconds, latest = defaultdict(float), {}
    for line in ninja_log.read_text().splitlines()[1:] if ninja_log.exists() else []:
        start, end, _, output = line.split("\t")[:4]
        latest[output] = (int(end) - int(start)) / 1000
    for output, taken in latest.items():
        if match := re.search(r"CMakeFiles/([^/]+)\.dir/.*\.(o|gch)$", output):
            seconds[match[1]] += taken
    return seconds


def main():
    build, output = Path(sys.argv[1]), Path(sys.argv[2])
    runs = runs_of((build / "Testing/Temporary/LastTest.log").read_text(errors="replace"))
    by_name = defaultdict(list)
    for run in runs:
        by_name[run.name].append(run)

    print(f"\n{sum(tries[-1].cases() for tries in by_name.values())} tests in {len(by_name)} runs of their programs.")
    reasons = defaultdict(list)
    for tries in by_name.values():
        for test, reason in tries[-1].skipped():
            reasons[reason].append(test)
    for reason, tests in reasons.items():
        print(f"Skipped {len(tests)}, such as {tests[0]}: {reason}")

    compiled = sorted(((seconds, f"{tree.parent.name}/{target}") for tree in build.glob("*/.ninja_log")
                       for target, seconds in compilation(tree).items()), reverse=True)
    print("\nCompilation, seconds (the latest of each file):")
    for seconds, target in compiled[:10]:
        print(f"{seconds:8.1f}  {target}")
    print(f"{sum(seconds for seconds, _ in compiled):8.1f}  all")

    print("\nThe ten slowest tests, seconds:")
    for run in sorted((tries[-1] for tries in by_name.values()), key=lambda run: -run.seconds)[:10]:
        print(f"{run.seconds:8.1f}  {run.name}")

    kept = build / "unstable"
    shutil.rmtree(kept, ignore_errors=True)
    for name, tries in by_name.items():
        if len(tries) > 1 and tries[-1].passed and not tries[0].passed:
            kept.mkdir(exist_ok=True)
            for number, run in enumerate(tries, 1):
                (kept / f"{name.replace('/', '_')}.{number}.log").write_text(run.text)
            failed = ", ".join(dict.fromkeys(re.findall(r"^\[  FAILED  \] ([\w/.]+)", tries[0].text, re.MULTILINE)))
            print(f"\nUNSTABLE: {name}{f' ({failed})' if failed else ''}: failed, then passed when repeated. "
                  f"Both logs are in {kept.relative_to(build.parent)}/")
    verdict = re.findall(r"^\d+% tests passed, \d+ tests failed out of \d+$", output.read_text(errors="replace"), re.MULTILINE)
    print("\n" + (verdict[-1] if verdict else "ctest gave no verdict"))


if __name__ == "__main__":
    main()
