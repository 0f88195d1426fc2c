"""What `pip install ./python` installs: a wheel packed from this build tree, which must contain everything needed."""
from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = os.environ.get("MUSTER_BUILD_DIR", "")  # set by ctest

for module in ("setuptools", "pip"):
    if not importlib.util.find_spec(module):
        print(f"skipped: {module} is not installed (pip install {module})")
        sys.exit(77)


class Wheel(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        shutil.copytree(ROOT / "python", self.folder / "python")  # setuptools leaves files beside its sources

    def pack(self, build: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index",
                               "--disable-pip-version-check", "--wheel-dir", self.folder / "out", self.folder / "python"],
                              text=True, capture_output=True, timeout=250, env=dict(os.environ, MUSTER_BUILD_DIR=build))

    def test_content(self) -> None:
        packed = self.pack(BUILD)
        self.assertEqual(packed.returncode, 0, packed.stdout + packed.stderr)
        wheel, = (self.folder / "out").glob("*.whl")
        self.assertNotIn("-none-any", wheel.name)  # the wheel is for one Python version and one kind of machine
        built = Path(BUILD) / "python" / "muster"
        mpi = built / "libmuster_mpi.so"
        modules = [path.name for path in built.glob("_muster.*.so")]
        expected = {"__init__.py", "_muster.pyi", "py.typed", *modules, *([mpi.name] if mpi.exists() else [])}
        with zipfile.ZipFile(wheel) as archive:
            names = {name.removeprefix("muster/") for name in archive.namelist() if ".dist-info/" not in name}
            self.assertEqual(names, expected)
            for name in sorted(expected):
                self.assertEqual(archive.read("muster/" + name), (built / name).read_bytes(), name)
            archive.extractall(self.folder / "installed")
            record = archive.read(next(name for name in archive.namelist() if name.endswith("/RECORD"))).decode()
        for name in expected:
            self.assertIn(f"muster/{name},sha256=", record)
        if not mpi.exists():
            self.skipTest("Muster was built without the mpi backend: apt-get install libopenmpi-dev, and build again")
        # It is the library that this module looks for, and it is complete.
        library = ctypes.CDLL(str(self.folder / "installed" / "muster" / mpi.name))
        symbols = [name for name in (b"muster_make_mpi_wire_%d" % version for version in range(1, 100))
                   if name + b"\0" in (built / modules[0]).read_bytes()]
        self.assertEqual(len(symbols), 1, symbols)
        self.assertTrue(hasattr(library, symbols[0].decode()))

    def test_a_build_tree_without_the_module_is_named(self) -> None:
        packed = self.pack(str(self.folder))
        self.assertNotEqual(packed.returncode, 0)
        self.assertIn(f"there is no {self.folder.resolve()}/python/muster/_muster", packed.stdout + packed.stderr)


if __name__ == "__main__":
    unittest.main()
