"""Builds the extension by CMake, from the repository that this folder lies in; everything else is in pyproject.toml.

Looks for torch at Torch_DIR, else in the Python for which pip runs. CMAKE_ARGS and CMAKE_BUILD_PARALLEL_LEVEL count.
MUSTER_BUILD_DIR is a build tree of this repository, for this Python (`./dev build`): its module is taken, and none built.
"""
from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent.parent
MPI = "libmuster_mpi.so"
PROBE = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"


def find_torch() -> tuple[str, dict[str, str]]:
    """The folder of TorchConfig.cmake, and the environment in which this Python sees its torch.

    pip builds in an environment without torch, which it makes by PYTHONPATH; behind it is the interpreter's own.
    """
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for environment in (dict(os.environ), own):
        folder = subprocess.run([sys.executable, "-c", PROBE], env=environment, text=True, capture_output=True).stdout.strip()
        if folder:
            return os.environ.get("Torch_DIR") or str(Path(folder) / "share" / "cmake" / "Torch"), environment
    sys.exit("muster: there is no torch in this Python. Install it first: muster is built for the torch that it finds.")


class CMakeBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        ready = os.environ.get("MUSTER_BUILD_DIR")
        module = (Path(ready).resolve() if ready else self.build_module()) / "python" / "muster" / target.name
        if not module.exists():
            sys.exit(f"muster: there is no {module}")
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(module), str(target))
        # The backend mpi loads it from beside the module; it is there where CMake found an MPI.
        if (module.parent / MPI).exists():
            self.copy_file(str((module.parent / MPI).resolve()), str(target.parent / MPI))

    def get_outputs(self) -> list[str]:
        outputs = super().get_outputs()
        return outputs + [path for output in list(outputs) if os.path.exists(path := str(Path(output).parent / MPI))]

    def build_module(self) -> Path:
        """The build tree."""
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        torch_dir, environment = find_torch()
        options = [f"-DTorch_DIR={torch_dir}", f"-DMUSTER_TORCH_PYTHON={sys.executable}", "-DCMAKE_BUILD_TYPE=Release",
                   "-DMUSTER_BUILD_TESTS=OFF", "-DMUSTER_BUILD_BENCH=OFF", "-DMUSTER_BUILD_EXAMPLES=OFF",
                   "-DMUSTER_BUILD_PYTHON=ON", "-DMUSTER_REQUIRE_PYTHON=ON", "-DMUSTER_WERROR=OFF", "-DBUILD_SHARED_LIBS=OFF"]
        generator = [] if "CMAKE_GENERATOR" in os.environ else ["-G", "Ninja"]
        subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), *generator, *options,
                        *shlex.split(os.environ.get("CMAKE_ARGS", ""))], env=environment, check=True)
        subprocess.run(["cmake", "--build", str(build), "--target", "_muster"], env=environment, check=True)
        return build


setup(ext_modules=[Extension("muster._muster", sources=[])], cmdclass={"build_ext": CMakeBuild})
