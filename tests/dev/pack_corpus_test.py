#!/usr/bin/env python3
"""tests/fuzz/pack_corpus.py keeps what was collected and what was kept, with a stand-in for libFuzzer."""

import pathlib
import subprocess
import sys
import tarfile
import tempfile
import unittest

PACK = pathlib.Path(__file__).resolve().parents[1] / "fuzz/pack_corpus.py"
# Merges as libFuzzer does, but keeps everything that is not empty. Says in a file who it is, and for which parser.
PROGRAM = """#!/bin/sh
shift 2
into=$1; shift
for folder; do find "$folder" -type f -size +0 -exec cp {} "$into" \\; ; done
echo "$(basename "$0") $MUSTER_FUZZ_PARSER" >> "$(dirname "$0")/ran"
"""


class PackCorpus(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.tests, self.into = pathlib.Path(place.name, "build/tests"), pathlib.Path(place.name, "into")
        self.into.mkdir()
        for name, inputs in {"rpc": ["one", "two", ""], "idx": ["three"], "plan": []}.items():
            (self.tests / "corpus" / name).mkdir(parents=True)
            for content in inputs:
                (self.tests / "corpus" / name / (content or "empty")).write_text(content)
        for program in ("libfuzzer_rpc", "libfuzzer_parsers"):
            (self.tests / program).write_text(PROGRAM)
            (self.tests / program).chmod(0o755)

    def pack(self, *parsers):
        subprocess.run([sys.executable, PACK, "--into", self.into, self.tests.parent, *parsers], check=True,
                       stdout=subprocess.DEVNULL)

    def kept(self, parser):
        with tarfile.open(self.into / f"{parser}.tar.xz") as tar:
            return {entry.name: tar.extractfile(entry).read().decode() for entry in tar}

    def test_each_parser_with_inputs_by_its_program(self):
        self.pack()
        self.assertEqual(self.kept("rpc"), {"one": "one", "two": "two"})
        self.assertEqual(self.kept("idx"), {"three": "three"})
        self.assertFalse((self.into / "plan.tar.xz").exists())
        self.assertEqual((self.tests / "ran").read_text(), "libfuzzer_parsers idx\nlibfuzzer_rpc rpc\n")

    def test_what_was_kept_stays(self):
        self.pack("rpc")
        first = (self.into / "rpc.tar.xz").read_bytes()
        self.pack("rpc")
        self.assertEqual((self.into / "rpc.tar.xz").read_bytes(), first)  # the same inputs, the same bytes
        for path in (self.tests / "corpus/rpc").iterdir():
            path.unlink()
        (self.tests / "corpus/rpc/four").write_text("four")
        self.pack("rpc")
        self.assertEqual(set(self.kept("rpc")), {"one", "two", "four"})
        self.assertFalse((self.into / "idx.tar.xz").exists())


if __name__ == "__main__":
    unittest.main()
