#!/usr/bin/env python3
"""Test of tools/check_includes.py: a small tree in a temporary folder, with each kind of name declared and used."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECK = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_includes.py"

HEADER = """
#pragma once
namespace muster::shm {
class PeerWatch;  // defined below
struct alignas(kLine) RingControl { int several_words() const; };
enum class WaitPhase { kSpin };
class PeerWatch final { void not_a_function(); };
template <typename T> T round_up(T n, T multiple) { int inner_value = 0; return n; }
constexpr size_t kCacheLine = 64;
using HostOfRank = int;
std::string text(int value);
bool await(int fd);
}  // namespace muster::shm
"""


class CheckIncludes(unittest.TestCase):
    def run_on(self, source, includes=(), middle=""):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for path, content in {"src/shm/layout.h": HEADER, "src/shm/middle.h": middle, "include/muster/none.h": "",
                                  "src/comm/source.cpp": "".join(f'#include "{name}"\n' for name in includes) + source}.items():
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text(content)
            done = subprocess.run([sys.executable, str(CHECK), str(root)], capture_output=True, text=True)
            self.assertEqual(done.stderr, "")
            return done.returncode, done.stdout

    USES = ("shm::PeerWatch* watch;", "RingControl ring;", "auto phase = WaitPhase::kSpin;", "int n = round_up(3, 4);",
            "int n = muster::shm::round_up(3, 4);", "int n = kCacheLine;", "HostOfRank rank;", "auto said = text(3);", "if (!await(3)) return;",
            "return round_up(1, 3);", "call(1, round_up(2, 3));", "call(1, kCacheLine);", "int n = 3 * round_up(2, 3);")

    def test_names_that_are_not_included_are_found(self):
        for use in self.USES:
            with self.subTest(use):
                code, said = self.run_on(f"void function() {{ {use} }}\n")
                self.assertEqual(code, 1, use)
                self.assertIn("comm/source.cpp: ", said)
                self.assertIn(" is declared in shm/layout.h", said)

    def test_headers_of_a_newer_libtorch_are_found(self):
        code, said = self.run_on("#include <torch/csrc/autograd/graph/node.h>\n")
        self.assertEqual((code, said), (1, "comm/source.cpp: libtorch 2.11 has no <torch/csrc/autograd/graph/node.h>: "
                                           "include <torch/csrc/autograd/function.h>\n"))
        self.assertEqual(self.run_on("#include <torch/csrc/autograd/function.h>\n"), (0, ""))

    def test_included_directly_or_not_they_are_not(self):
        for use in self.USES:
            self.assertEqual(self.run_on(use, ["shm/layout.h"]), (0, ""), use)
            self.assertEqual(self.run_on(use, ["shm/middle.h"], '#include "shm/layout.h"\n'), (0, ""), use)

    def test_other_things_of_the_same_name_are_not(self):
        for use in ("// PeerWatch\n", 'auto s = "PeerWatch";', "object.round_up(3);", "pointer->round_up(3);", "std::round_up(3);",
                    "int round_up(int n) { return n; } int m = round_up(3);", "const int a = 3, kCacheLine = 4; int n = kCacheLine;",
                    "struct PeerWatch {}; PeerWatch watch;", "not_a_function();", "inner_value = 3; several_words();"):
            self.assertEqual(self.run_on(use), (0, ""), use)


if __name__ == "__main__":
    unittest.main()
