#!/usr/bin/env python3
"""Test of ./dev: what it installs, which libtorch it takes, what it configures and builds, and what it says when it cannot.

A copy of the script runs in a temporary checkout whose PATH begins with stand-ins for apt-get, dpkg-query, sudo, python3, cmake
and ctest. They write down how they were called, so nothing is installed or built here.
"""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]

STAND_INS = {
    "dpkg-query": r'''for p in "$@"; do grep -qxF "$p" "$FAKE/installed" && echo "$p installed"; done; exit 1''',
    "apt-get": r'''echo "apt-get $*" >>"$FAKE/log"
[[ $1 != install || ! -e $FAKE/apt-fails ]] || { echo "E: Unable to locate" >&2; exit 100; }
[[ $1 != install ]] || printf '%s\n' "$@" >>"$FAKE/installed"''',
    "sudo": r'''[[ -e $FAKE/sudo-works ]] || { echo "sudo: a password is required" >&2; exit 1; }
[[ $1 != -n ]] || shift
exec "$@"''',
    # Its torch is in the folder ../torch beside its own; pip puts one there.
    "python3": r'''here=$(cd "$(dirname "$0")/.." && pwd)
case "$*" in
  *find_spec*) [[ -d $here/torch ]] && echo "$here/torch" ;;
  *"import torch"*) [[ -d $here/torch && ! -e $here/torch/broken ]] ;;
  *ensurepip*) exit 0 ;;
  *cache_tag*) echo cpython-312 ;;
  "-m pip --version") exit 0 ;;
  "-m venv"*) echo "python3 $*" >>"$FAKE/log"; mkdir -p "${!#}/bin"; cp "$0" "${!#}/bin/python" ;;
  "-m pip install"*)
    echo "pip ${*:4}" >>"$FAKE/log"
    mkdir -p "$here/torch/share/cmake/Torch"; touch "$here/torch/share/cmake/Torch/TorchConfig.cmake"
    [[ ! -p $FAKE/pip-waits ]] || read -r <"$FAKE/pip-waits"
    [[ ! -e $FAKE/offline ]] || { echo "ERROR: no connection" >&2; exit 1; }
    echo 'set(PACKAGE_VERSION "2.13.0")' >"$here/torch/share/cmake/Torch/TorchConfigVersion.cmake" ;;
  *) echo "python3 $*" >>"$FAKE/log" ;;
esac''',
    "cmake": r'''echo "cmake $*" >>"$FAKE/log"
case $1 in
  --preset) mkdir -p "build/$2"; touch "build/$2/build.ninja"; [[ ! -e $FAKE/configure-fails ]] ;;
  --build) [[ ! -e $FAKE/build-fails ]] ;;
esac''',
    "ctest": r'''echo "ctest $*${MUSTER_FUZZ_SECONDS:+ fuzz $MUSTER_FUZZ_SECONDS}" >>"$FAKE/log"; [[ ! -e $FAKE/tests-fail ]]''',
}


class Dev(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        base = pathlib.Path(self.folder.name)
        base.chmod(0o777)
        self.checkout, self.fake = base / "checkout with spaces", base / "fake"
        (self.fake / "bin").mkdir(parents=True)
        self.checkout.mkdir()
        for path in (self.checkout, self.fake):
            path.chmod(0o777)
        shutil.copy(ROOT / "dev", self.checkout)
        shutil.copy(ROOT / "CMakePresets.json", self.checkout)
        (self.checkout / "tools").mkdir()
        shutil.copy(ROOT / "tools/packages.sh", self.checkout / "tools")
        for name, body in STAND_INS.items():
            path = self.fake / "bin" / name
            path.write_text(f"#!/bin/bash\n{body}\n")
            path.chmod(0o755)
        self.log = self.fake / "log"
        self.set_installed(re.findall(r"^  ([a-z0-9+-]+) +#", (ROOT / "tools/packages.sh").read_text(), re.M) + ["clang-format", "clang-tidy"])

    def set_installed(self, packages):
        path = self.fake / "installed"
        path.write_text("".join(f"{p}\n" for p in packages))
        path.chmod(0o666)

    def make_torch(self, folder, version="2.13.0"):
        cmake = folder / "share/cmake/Torch"
        cmake.mkdir(parents=True)
        (cmake / "TorchConfig.cmake").touch()
        (cmake / "TorchConfigVersion.cmake").write_text(f'set(PACKAGE_VERSION "{version}")\n')
        return cmake

    def environment(self, **more):
        return {"PATH": f"{self.fake}/bin:/usr/bin:/bin", "FAKE": str(self.fake), "HOME": f"{self.fake}/nobody"} | more

    def dev(self, *arguments, unprivileged=False, script=None, **environment):
        """Runs ./dev; returns (status, what it printed, what the stand-ins wrote down)."""
        self.log.write_text("")
        self.log.chmod(0o666)
        as_user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if unprivileged and os.geteuid() == 0 else []
        result = subprocess.run(
            [*as_user, script or self.checkout / "dev", *arguments], text=True, timeout=60, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=self.environment(**environment))
        return result.returncode, result.stdout, self.log.read_text()

    def test_help_lists_every_command(self):
        for arguments in (["help"], ["--help"], []):
            status, output, log = self.dev(*arguments)
            self.assertEqual((status, log), (0, ""))
            for command in ("demo", "test", "bench", "build", "lint", "fmt"):
                self.assertRegex(output, rf"(?m)^  {command} ")

    def test_help_of_a_command_installs_and_builds_nothing(self):
        self.set_installed([])
        for arguments in (["build", "--help"], ["test", "--help"], ["test", "--full", "-h"], ["fmt", "-h"], ["lint", "--help"]):
            status, output, log = self.dev(*arguments)
            self.assertEqual((status, log), (0, ""), output)
            self.assertIn("usage: ./dev COMMAND", output)
        status, output, log = self.dev("bench", "--help")
        self.assertEqual(status, 0, output)
        self.assertRegex(log, r"^python3 .*/bench/run\.py --help\n$")

    def test_unknown_command(self):
        status, output, log = self.dev("tset")
        self.assertEqual((status, log), (1, ""))
        self.assertIn("there is no command 'tset'", output)

    def test_missing_packages_without_root_or_sudo(self):
        self.set_installed(["g++", "cmake"])
        status, output, log = self.dev("build", unprivileged=True)
        self.assertEqual((status, log), (1, ""), output)
        command = re.search(r"^  apt-get update && apt-get install --no-install-recommends (.*)$", output, re.M)
        self.assertIn("ninja-build", command[1].split())
        self.assertNotIn("cmake", command[1].split())

    def test_missing_packages_are_installed_once(self):
        self.make_torch(self.fake / "torch")
        (self.fake / "sudo-works").touch()
        self.set_installed(["g++"])
        status, output, log = self.dev("build", unprivileged=True)
        self.assertEqual(status, 0, output)
        self.assertRegex(log, r"apt-get update.*\napt-get install .*--no-install-recommends cmake ninja-build")
        status, output, log = self.dev("build", unprivileged=True)
        self.assertEqual(status, 0, output)
        self.assertNotIn("apt-get", log)

    def test_a_failing_apt_get(self):
        (self.fake / "sudo-works").touch()
        (self.fake / "apt-fails").touch()
        self.set_installed([])
        status, output, log = self.dev("build")
        self.assertEqual(status, 1)
        self.assertIn("apt-get could not install: g++", output)
        self.assertNotIn("cmake --preset", log)

    def test_demo_needs_the_data_set_unless_told_where_it_is(self):
        self.make_torch(self.fake / "torch")
        packages = (self.fake / "installed").read_text().split()
        self.set_installed([p for p in packages if p != "dataset-fashion-mnist"])
        status, output, _ = self.dev("demo", unprivileged=True)
        self.assertEqual(status, 1)
        self.assertIn("--no-install-recommends dataset-fashion-mnist\n", output)
        for arguments in (["--data", "/tmp"], ["--data=/tmp"]):
            _, output, log = self.dev("demo", *arguments, unprivileged=True)
            self.assertIn("--target muster_command fashion_mnist", log, output)

    def test_takes_libtorch_from_the_environment(self):
        ours, pythons = self.make_torch(self.fake / "elsewhere"), self.make_torch(self.fake / "torch")
        for environment in ({"Torch_DIR": str(ours)}, {"CMAKE_PREFIX_PATH": f"/nothing:{self.fake}/elsewhere"},
                            {"CMAKE_PREFIX_PATH": str(ours.parent)}):
            shutil.rmtree(self.checkout / "build", ignore_errors=True)
            status, output, log = self.dev("build", **environment)
            self.assertEqual(status, 0, output)
            self.assertIn(f"-DTorch_DIR={ours}\n", log)
            self.assertIn("Using libtorch 2.13.0", output)
        status, output, log = self.dev("build")
        self.assertIn(f"cmake --preset release --fresh -DTorch_DIR={pythons}\n", log)  # another libtorch: from the start

    def test_leaves_an_old_libtorch_aside(self):
        old, pythons = self.make_torch(self.fake / "old", "2.10.1"), self.make_torch(self.fake / "torch", "2.11.0")
        status, output, log = self.dev("build", Torch_DIR=str(old))
        self.assertEqual(status, 0, output)
        self.assertIn("Leaving aside libtorch 2.10.1", output)
        self.assertIn(f"-DTorch_DIR={pythons}\n", log)

    def test_without_libtorch_pip_brings_exactly_one(self):
        self.make_torch(self.fake / "torch")
        (self.fake / "torch" / "broken").touch()
        status, output, log = self.dev("build")
        self.assertEqual(status, 0, output)
        self.assertIn(f"python3 -m venv --clear {self.checkout}/.venv\n", log)
        self.assertEqual(re.findall(r"(?m)^pip (.*)$", log), ["--disable-pip-version-check --no-compile torch==2.13.0 numpy safetensors"])
        self.assertIn(f"-DTorch_DIR={self.checkout}/.venv/torch/share/cmake/Torch\n", log)
        status, output, log = self.dev("build")
        self.assertEqual((status, re.findall(r"pip|venv|preset", log)), (0, []), output)

    def checkouts_of_a_user(self):
        """Two more checkouts, the user's home and the folder in which both shall have torch."""
        checkouts = [self.fake / name for name in ("first", "second")]
        for checkout in checkouts:
            shutil.copytree(self.checkout, checkout)
        home = self.fake / "home"
        home.mkdir()
        return *checkouts, home, home / ".cache/muster/torch-2.13.0-cpython-312"

    def test_checkouts_share_what_pip_brought(self):
        first, second, home, shared = self.checkouts_of_a_user()
        status, output, log = self.dev("build", script=first / "dev", HOME=str(home))
        self.assertEqual(status, 0, output)
        self.assertIn(f"python3 -m venv --clear {shared}\n", log)
        self.assertEqual(len(re.findall(r"(?m)^pip ", log)), 1)
        self.assertIn(f"-DTorch_DIR={first}/.venv/torch/share/cmake/Torch\n", log)
        status, output, log = self.dev("build", script=second / "dev", HOME=str(home))
        self.assertEqual((status, re.findall(r"pip|venv --clear", log)), (0, []), output)
        self.assertEqual([checkout.joinpath(".venv").readlink() for checkout in (first, second)], [shared, shared])
        subprocess.run(["git", "init", "--quiet", second], check=True)
        shutil.copy(ROOT / ".gitignore", second)
        untracked = subprocess.run(["git", "-C", second, "status", "--porcelain"], check=True, text=True, stdout=subprocess.PIPE).stdout
        self.assertNotIn("venv", untracked)  # git's "/.venv/" would ignore a folder, and not a link

        # Another version of torch is another folder, and a folder that is there already stays what it is.
        other = self.fake / "other"
        shutil.copytree(second, other, symlinks=True)
        (other / ".venv").unlink()
        (other / "dev").write_text((other / "dev").read_text().replace("torch_wanted=2.13.0", "torch_wanted=2.14.0"))
        self.assertIn("torch-2.14.0-", self.dev("build", script=other / "dev", HOME=str(home))[2])
        (other / ".venv").unlink()
        (other / ".venv").mkdir()
        self.assertIn(f"venv --clear {other}/.venv\n", self.dev("build", script=other / "dev", HOME=str(home))[2])

    def test_an_interrupted_installation_is_begun_again(self):
        first, second, home, shared = self.checkouts_of_a_user()
        (self.fake / "offline").touch()
        self.assertEqual(self.dev("build", script=first / "dev", HOME=str(home))[0], 1)
        self.assertTrue((shared / "torch").exists())
        self.assertFalse((first / ".venv").exists())
        (self.fake / "offline").unlink()
        for checkout, installations in ((second, 1), (first, 0)):
            status, output, log = self.dev("build", script=checkout / "dev", HOME=str(home))
            self.assertEqual((status, len(re.findall(r"(?m)^pip ", log))), (0, installations), output)

    def test_a_checkout_waits_for_the_installation_of_another(self):
        first, second, home, shared = self.checkouts_of_a_user()
        os.mkfifo(self.fake / "pip-waits")
        both = [subprocess.Popen([first / "dev", "build"], env=self.environment(HOME=str(home)), stdout=subprocess.DEVNULL)]
        with open(self.fake / "pip-waits", "w", encoding="utf-8") as pip:  # opens when pip of the first reads
            both.append(subprocess.Popen([second / "dev", "build"], env=self.environment(HOME=str(home)), text=True,
                                         stdout=subprocess.PIPE))
            self.assertIn(f"another checkout has installed into {shared}", both[1].stdout.readline())
            pip.write("go on\n")
        both[1].communicate(timeout=60)
        self.assertEqual([process.wait(timeout=60) for process in both], [0, 0])
        self.assertEqual(len(re.findall(r"(?m)^pip ", self.log.read_text())), 1)

    def test_offline_without_libtorch(self):
        (self.fake / "offline").touch()
        status, output, log = self.dev("build")
        self.assertEqual(status, 1)
        self.assertIn("pip could not install torch==2.13.0 numpy safetensors", output)
        self.assertNotIn("--preset", log)

    def test_configures_only_when_something_changed(self):
        self.make_torch(self.fake / "torch")
        self.assertIn("--preset release", self.dev("build")[2])
        self.assertNotIn("--preset", self.dev("build", "some_target")[2])
        with open(self.checkout / "CMakePresets.json", "a", encoding="utf-8") as presets:
            presets.write("\n")
        self.assertIn("--preset release --fresh", self.dev("build")[2])
        self.assertIn("--preset debug", self.dev("build", PRESET="debug")[2])

    def test_configures_again_after_a_failure(self):
        self.make_torch(self.fake / "torch")
        self.dev("build")
        (self.fake / "configure-fails").touch()
        (self.checkout / "CMakePresets.json").write_text("{}")
        for _ in range(2):
            status, output, log = self.dev("build")
            self.assertEqual(status, 1)
            self.assertIn("could not configure", output)
            self.assertNotIn("--build", log)
        (self.checkout / "CMakePresets.json").write_text((ROOT / "CMakePresets.json").read_text())  # as at first
        (self.fake / "configure-fails").unlink()
        self.assertIn("--preset release", self.dev("build")[2])

    def test_runs_through_a_symbolic_link(self):
        self.make_torch(self.fake / "torch")
        link = self.fake / "link"
        link.symlink_to(self.checkout / "dev")
        status, output, log = self.dev("build", script=link)
        self.assertEqual(status, 0, output)
        self.assertIn(f"cmake --build {self.checkout}/build/release", log)

    def test_a_build_that_fails_fails(self):
        self.make_torch(self.fake / "torch")
        (self.fake / "build-fails").touch()
        for command in ("build", "demo", "test", "bench"):
            status, output, log = self.dev(command)
            self.assertEqual(status, 1, output)
            self.assertIn("does not build", output)
            self.assertNotIn("ctest", log)

    def test_the_gate_is_one_run_over_two_trees(self):
        self.make_torch(self.fake / "torch")
        status, output, log = self.dev("test", "-R", "Store")
        self.assertEqual(status, 0, output)
        self.assertEqual(re.findall(r"--preset (\w+)", log), ["release", "tsan"])
        self.assertEqual(len(re.findall(r"(?m)^cmake --build .* --target gate$", log)), 2, log)
        self.assertRegex(log, r"(?m)^ctest --test-dir .* -R Store --label-exclude \^full\$ --repeat until-pass:2$")
        self.assertEqual((self.checkout / "build/CTestTestfile.cmake").read_text(), "subdirs(release)\nsubdirs(tsan)\n")

    def test_full_builds_all_trees_leaves_nothing_out_and_repeats_nothing(self):
        self.make_torch(self.fake / "torch")
        status, output, log = self.dev("test", "--full")
        self.assertEqual(status, 0, output)
        self.assertEqual((self.checkout / "build/CTestTestfile.cmake").read_text(), "subdirs(release)\nsubdirs(asan)\nsubdirs(tsan)\n")
        self.assertNotRegex(log, "--target|label-exclude|--repeat|fuzz")
        status, output, hours = self.dev("test", "--long", "-R", "libfuzzer")
        self.assertEqual(status, 0, output)
        self.assertRegex(hours, r"(?m)^ctest .* -R libfuzzer fuzz 3600$")
        self.assertEqual(hours.count("cmake --build"), log.count("cmake --build"))

    def test_a_part_of_the_full_run(self):
        self.make_torch(self.fake / "torch")
        status, output, log = self.dev("test", "--full", "--tree", "asan", "-R", "Store")
        self.assertEqual(status, 0, output)
        self.assertEqual((self.checkout / "build/CTestTestfile.cmake").read_text(), "subdirs(asan)\n")
        self.assertEqual(re.findall(r"--preset (\w+)", log), ["asan"])
        self.assertRegex(log, r"(?m)^ctest --test-dir .* -R Store$")
        for arguments in (["--full", "--tree"], ["--full", "--tree", "debug"], ["--tree", "asan"]):
            status, output, log = self.dev("test", *arguments)
            self.assertEqual(status, 1, output)
            self.assertIn("--tree", output)
            self.assertNotIn("ctest", log)

    def test_a_test_that_fails_fails(self):
        self.make_torch(self.fake / "torch")
        (self.fake / "tests-fail").touch()
        self.assertNotEqual(self.dev("test")[0], 0)

    def test_starts_with_standard_input_closed(self):
        status = subprocess.run(["bash", "-c", '"$0" help <&- >/dev/null', self.checkout / "dev"], timeout=30, check=False).returncode
        self.assertEqual(status, 0)


if __name__ == "__main__":
    unittest.main()
