#!/usr/bin/env python3
"""Test of tools/check_layers.py: small trees in a temporary folder, each with one thing wrong, or with nothing wrong."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECK = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_layers.py"

GOOD = {
    "include/muster/muster.h": '#include "muster/train/trainer.h"\n#include "muster/comm/group.h"\n',
    "include/muster/base/error.h": "#include <string>\n",
    "include/muster/comm/group.h": '#include <ATen/core/Tensor.h>\n#include "muster/base/error.h"\n',
    "include/muster/train/trainer.h": '#include "muster/comm/group.h"\n',
    "include/muster/parallel/ddp.h": '#include "muster/comm/group.h"\n',
    "include/muster/launch/launcher.h": '#include "muster/base/error.h"\n',
    "src/base/text.h": "#include <sstream>\n",
    "src/store/kit/store.cpp": '#include "muster/base/error.h"\n#include "base/text.h"\n#include <sys/socket.h>\n',
    "src/store/c10d/c10d_store.cpp": "#include <torch/csrc/distributed/c10d/Store.hpp>\n",
    "src/comm/core/table.h": '#include "muster/comm/group.h"\n',
    "src/comm/kit/collective_queue.h": '#include "comm/core/table.h"\n',
    "src/comm/backends/table.cpp": '#include "comm/backends/shm/shm.h"\n#include "comm/backends/fake/fake.h"\n',
    "src/comm/backends/shm/shm.h": '#include "comm/kit/collective_queue.h"\n',
    "src/comm/backends/fake/fake.h": '#include "comm/core/table.h"\n',
    "src/comm/world/group.cpp": '#include "muster/comm/group.h"\n#include "store/c10d_store.h"\n#include "group_state.h"\n',
    "src/comm/world/group_state.h": '#include "launch/ranks/agent.h"\n',
    "src/parallel/kit/buckets.h": "#pragma once\n",
    "src/parallel/ddp/ddp.cpp": '#include "muster/parallel/ddp.h"\n#include "parallel/kit/buckets.h"\n',
    "src/parallel/fsdp/shard.h": '#include "parallel/kit/buckets.h"\n',
    "src/launch/ranks/agent.cpp": '#include "store/kit/store.h"\n',
    "tools/muster.cpp": '#include "launch/ranks/agent.h"\n#include <CLI/CLI.hpp>\n',
}

# name: (file, the line to put into it, what the message has to say)
BROKEN = {
    "back edge": ("src/base/text.h", '#include "comm/core/table.h"', "base comes before comm"),
    "back edge by public header": ("include/muster/base/error.h", '#include <muster/comm/group.h>', "base comes before comm"),
    "back edge by relative path": ("src/base/text.h", '#include "../comm/core/table.h"', "base comes before comm"),
    "indented": ("src/base/text.h", '  #  include "comm/core/table.h"', "base comes before comm"),
    "siblings": ("src/parallel/ddp/ddp.cpp", '#include "parallel/fsdp/shard.h"', "parallel/ddp and parallel/fsdp are siblings"),
    "siblings by relative path": ("src/parallel/ddp/ddp.cpp", '#include "../fsdp/shard.h"', "are siblings"),
    "sibling by public header": ("src/parallel/fsdp/shard.h", '#include "muster/parallel/ddp.h"', "are siblings"),
    "back edge between rooms": ("src/comm/core/table.h", '#include "comm/kit/collective_queue.h"', "room core of comm comes before room kit"),
    "back edge between rooms by relative path": ("src/comm/kit/collective_queue.h", '#include "../world/group_state.h"',
                                                "room kit of comm comes before room world"),
    "room in public header": ("include/muster/comm/group.h", '#include "comm/core/table.h"',
                              "a public header of comm comes before room core"),
    "outside the rooms": ("src/comm/lost.cpp", "#include <string>", "not in a room of comm"),
    "back edge beside the siblings": ("src/parallel/kit/buckets.h", '#include "parallel/fsdp/shard.h"',
                                      "room kit of parallel comes before room fsdp"),
    "sibling backends": ("src/comm/backends/shm/shm.h", '#include "comm/backends/fake/fake.h"', "are siblings"),
    "torch in base": ("src/base/text.h", "#include <ATen/ATen.h>", "base must not include libtorch"),
    "c10 in store": ("src/store/kit/store.cpp", "#include <c10/util/Exception.h>", "store must not include libtorch"),
    "torch in launch": ("src/launch/ranks/agent.cpp", "#include <torch/torch.h>", "launch must not include libtorch"),
    "comm in launch": ("src/launch/ranks/agent.cpp", '#include "muster/comm/group.h"', "launch comes before comm"),
    "adapter in store": ("src/store/kit/store.cpp", '#include "store/c10d_store.h"', "which brings libtorch"),
    "torch in tools": ("tools/muster.cpp", "#include <torch/torch.h>", "tools must not include libtorch"),
    "comm in tools": ("tools/muster.cpp", '#include "comm/core/table.h"', "tools comes before comm"),
    "umbrella": ("src/comm/world/group.cpp", '#include "muster/muster.h"', "umbrella"),
    "no such layer": ("src/comm/world/group.cpp", '#include "muster/misc/stuff.h"', "'misc' is not a layer"),
    "too long": ("src/base/text.h", "\n" * 500, "more than 500 lines"),
    "new folder": ("src/misc/stuff.cpp", "#include <string>", "'misc' is not a layer"),
}


def run(files):
    with tempfile.TemporaryDirectory() as root:
        for name, content in files.items():
            path = pathlib.Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return subprocess.run([sys.executable, CHECK, root], capture_output=True, text=True, timeout=30)


class CheckLayers(unittest.TestCase):
    def test_accepts_a_tree_in_order(self):
        result = run(GOOD)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertIn(f"{len(GOOD)} files, 0 violations", result.stdout)

    def test_finds_each_violation(self):
        for name, (file, line, message) in BROKEN.items():
            with self.subTest(name):
                content = GOOD.get(file, "") + line + "\n"
                result = run(GOOD | {file: content})
                self.assertEqual(result.returncode, 1, result.stdout)
                self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
                self.assertIn(message, result.stderr)
                number = 1 if name in ("new folder", "outside the rooms") else len(content.splitlines())
                self.assertTrue(result.stderr.startswith(f"{file}:{number}: "), result.stderr)

    def test_an_empty_tree_is_an_error(self):
        self.assertEqual(run({}).returncode, 2)


if __name__ == "__main__":
    unittest.main()
