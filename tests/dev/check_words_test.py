#!/usr/bin/env python3
"""tools/check_words.py finds what it is for, and nothing else."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
from check_words import phrases_in, wide_lines_in  # noqa: E402


class CheckWords(unittest.TestCase):
    def test_finds(self):
        for line in ("// It answers at once.", "believes in 4 ranks", "the own slot", "// an own thread", "// lest it hang",
                     "a worker that there is not", "At once, all of them", "0 ranks make no job", "4 hosts makes no job",
                     "'a.txt' is no file of black boxes", "names that are no UTF-8", "it was no failure", "`x` is no layer",
                     "faults on order", "one memfd a group", "one process an epoch", "findings, one a line",
                     "a rank that does not want a name", "the kernel did not want it", "SIGTERM asks for no stop",
                     "It asked for no reply"):
            self.assertEqual(len(phrases_in(line)), 1, line)

    def test_says_what_is_better(self):
        self.assertEqual(phrases_in("it asks for no gradient"), [("asks for no gradient", "does not require grad")])

    def test_leaves_other_words_alone(self):
        for line in ("at one's own risk", "its own slot", "the owner", "the latest", "a celesta", "that there is no room",
                     '"at once" stands in a quotation  // words: ok', "there is no file", "There are no peers", "it is no longer here",
                     "it takes no lock and makes no system call", "// is no such object", "it was no faster",
                     "in common order", "results that depend on order", "corrupt_on_order(contribution)",
                     "one at a time, for one of a group", "who sends one gets a process", "the one with a line of its own",
                     "the user does not want to wait", "who do not want colours", "asks for none", "It asks for notice"):
            self.assertEqual(phrases_in(line), [], line)

    def test_finds_wide_prose_only(self):
        wide = "word " * 21
        self.assertEqual(wide_lines_in("\n".join(["short", wide, "| " + wide, "    " + wide, "```", wide, "```", wide])), [2, 8])


if __name__ == "__main__":
    unittest.main()
