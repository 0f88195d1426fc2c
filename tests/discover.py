#!/usr/bin/env python3
"""Asks a gtest program for its tests and turns them into ctest tests: one per suite, not one per test.

    discover.py PROGRAM OUTPUT.cmake [--prefix asan/] [--labels "comm"] [--filter "-*Fork*"] [--alone PATTERNS] [--full PATTERNS] [--each PATTERNS]
                [--slow PATTERNS] [--together NAME=SUITES]… [--timeout SECONDS] [--environment NAME=VALUE]…

A process that loads libtorch takes a third of a second to start, and many tests take less. A suite with named
parameters, such as a backend's name, becomes one ctest test per parameter: "Comm/Errors/gloo_threads".

--together makes one ctest test of several small suites, whose names are separated by colons. If NAME ends in "/*", it is
one test per parameter, "Comm/Small/gloo_threads" of "Comm/Small/*". Tests that fork must not be together with tests that
do not: the threads that those leave behind do not survive the fork.

A suite whose name contains "Fuzz" gets MUSTER_FUZZ_SECONDS more for each of its tests. ctest reads the variable when it
runs, as the tests do.

Patterns are gtest's, separated by colons. ctest runs nothing else at the same time as tests that match --alone. Tests
that match --full get the label `full`: `./dev test` leaves them out. A suite with tests of several of these kinds
becomes one ctest test per kind: "Comm/Errors/gloo_threads", "Comm/Errors/gloo_threads.alone",
"Comm/Errors/gloo_threads.full". Each test that matches --each gets its own process and its own name.
ctest starts suites with tests that match --slow first: as the last ones they would leave other processors idle.
"""

import argparse
import fnmatch
import re
import subprocess
import sys
from pathlib import Path


def matches(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(":") if pattern)


def tests_of(program, pattern):
    """Yields (suite, test) for each test of the program, without the comments that gtest prints behind parameters."""
    listing = subprocess.run([program, "--gtest_list_tests", f"--gtest_filter={pattern or '*'}"], check=True, timeout=120,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout
    suite = None
    for line in listing.splitlines():
        name = line.split("#", 1)[0].rstrip()
        if name.startswith("  "):
            yield suite, name.strip()
        elif name.endswith("."):
            suite = name[:-1]


def entry_of(suite, test, together):
    """Returns the ctest test of a gtest test: the name of its suite, or of what that suite is together with, and its parameter's
    name unless that is a number."""
    parameter = test.rpartition("/")[2] if "/" in test else ""
    if suite in together:
        suite = together[suite]
        if not suite.endswith("/*"):
            return suite
        suite = suite[:-2]
    return suite if not parameter or re.fullmatch(r"\d+", parameter) else f"{suite}/{parameter}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("output", type=Path)
    for option in ("--prefix", "--labels", "--filter", "--alone", "--full", "--each", "--slow"):
        parser.add_argument(option, default="")
    parser.add_argument("--timeout", type=int, required=True)
    parser.add_argument("--environment", action="append", default=[])
    parser.add_argument("--together", action="append", default=[])
    args = parser.parse_args()

    together = {suite: name for name, _, suites in (group.partition("=") for group in args.together) for suite in suites.split(":")}
    entries = {}
    tests = list(tests_of(args.program, args.filter))
    for suite, test in tests:
        name = f"{suite}.{test}"
        kind = ".full" if matches(name, args.full) else ".alone" if matches(name, args.alone) else ""
        entry = name if matches(name, args.each) else entry_of(suite, test, together)
        entries.setdefault((entry + kind, kind), []).append(name)
    unknown = set(together) - {suite for suite, _ in tests}
    if unknown and not args.filter:
        sys.exit(f"{args.program} has no suites {', '.join(sorted(unknown))} (--together)")
    if not entries:
        sys.exit(f"{args.program} has no tests that match '{args.filter}'")

    lines = ['set(fuzz_seconds "$ENV{MUSTER_FUZZ_SECONDS}")', "if(NOT fuzz_seconds)", "  set(fuzz_seconds 0)", "endif()"]
    for (entry, kind), names in entries.items():
        entry = args.prefix + entry
        timeout = str(args.timeout)
        if "Fuzz" in entry:
            lines.append(f'math(EXPR fuzz_timeout "{args.timeout} + {len(names)} * ${{fuzz_seconds}}")')
            timeout = "${fuzz_timeout}"
        properties = {"TIMEOUT": timeout, "LABELS": args.labels + (";full" if kind == ".full" else "")}
        if kind and any(matches(name, args.alone) for name in names):
            properties["RUN_SERIAL"] = "TRUE"
        if any(matches(name, args.slow) for name in names):
            properties["COST"] = "100"
        if args.environment:
            properties["ENVIRONMENT"] = ";".join(args.environment)
        words = " ".join(f'{key} "{value}"' for key, value in properties.items())
        lines.append(f'add_test("{entry}" "{args.program}" "--gtest_filter={":".join(names)}")')
        lines.append(f'set_tests_properties("{entry}" PROPERTIES {words})')
    args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
