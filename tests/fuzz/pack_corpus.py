#!/usr/bin/env python3
"""Packs what long runs of libFuzzer have found, for all runs to begin with: tests/fuzz/corpus/<parser>.tar.xz.

    tests/fuzz/pack_corpus.py build/release [PARSER…]

Of the inputs that were collected, and of those in the archive so far, libFuzzer keeps those that reach more code than
the others do.
"""
import argparse
import io
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

KEPT = pathlib.Path(__file__).resolve().parent / "corpus"
LONGEST = 4096  # bytes of an input; longer ones would make up most of the archive


def pack(folder: pathlib.Path, archive: pathlib.Path) -> int:
    """The same inputs give the same bytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in files:
            content = path.read_bytes()
            entry = tarfile.TarInfo(path.name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return len(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("parsers", nargs="*", metavar="PARSER")
    parser.add_argument("--into", type=pathlib.Path, default=KEPT, help="the folder of the archives")
    arguments = parser.parse_args()
    tests = arguments.build / "tests"
    collected = tests / "corpus"
    for name in arguments.parsers or sorted(path.name for path in collected.iterdir() if any(path.iterdir())):
        archive = arguments.into / f"{name}.tar.xz"
        program = tests / f"libfuzzer_{name}"
        if not program.exists():
            program = tests / "libfuzzer_parsers"
        with tempfile.TemporaryDirectory() as place:
            merged, before = pathlib.Path(place, "merged"), pathlib.Path(place, "before")
            merged.mkdir()
            before.mkdir()
            if archive.exists():
                with tarfile.open(archive) as tar:
                    tar.extractall(before, filter="data")
            subprocess.run([program, "-merge=1", f"-max_len={LONGEST}", merged, collected / name, before], check=True,
                           env={**os.environ, "MUSTER_FUZZ_PARSER": name}, stderr=subprocess.DEVNULL)
            count = pack(merged, archive)
        print(f"{name}: {count} inputs, {archive.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
