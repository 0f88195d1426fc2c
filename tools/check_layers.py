#!/usr/bin/env python3
"""Checks that the layers of docs/architecture.md, and the rooms of a layer, include each other in one direction only.

Reads the #include lines of src/, include/muster/ and tools/ and fails on
  - an include of a later layer, or of a folder that is not a layer;
  - an include of a later room of the same layer, and a file of a layer with rooms that is in none of them;
  - an include from one sibling folder to another (e.g. parallel/ddp to parallel/fsdp);
  - libtorch, or a layer that brings it, where there must be none (the launcher starts in milliseconds);
  - an include of the umbrella header muster/muster.h, which brings every layer.
It also fails on ./dev, and on any file of code in the folders of CODE_FOLDERS, if it has more than 500 lines: it has two roles.

    tools/check_layers.py [ROOT]      exit status 0: in order; 1: violations, one per line; 2: wrong usage
"""
import pathlib
import re
import sys

# In order: each layer may include itself and the layers before it.
LAYERS = ["base", "shm", "store", "launch", "transport", "comm", "rpc", "autograd", "optim", "mesh", "parallel", "remote",
          "data", "checkpoint", "train"]
NO_TORCH = {"base", "shm", "store", "transport", "launch", "tools"}
# tools/ is thin mains over the layers without libtorch; it stands after them.
ORDER = {layer: i for i, layer in enumerate(LAYERS)} | {"tools": LAYERS.index("transport") + 0.5}

# The rooms of a layer, in order: folders of src/LAYER that may include themselves and the rooms before them. Public
# headers stand before all rooms.
ROOMS = {"store": ["kit", "address", "table", "served", "etcd", "c10d"],
         "comm": ["core", "algorithms", "kit", "wire", "backends", "world", "api", "c10d"],
         "launch": ["kit", "black_box", "output", "ranks", "rendezvous", "supervisor", "jobs"],
         "rpc": ["values", "kit", "objects", "agent", "api"],
         "autograd": ["graph", "passes"],
         "parallel": ["kit", "tape", "modules", "gradients", "batch_norm", "hooks", "ddp", "fsdp", "api"]}

# Folders of which some sub-folders (without a list: all) must not include each other.
SIBLINGS = {"parallel": ["hooks", "ddp", "fsdp"], "transport": None, "comm/backends": None}

# Files that may include libtorch, and the layers that bring it, all the same. By path without root and extension.
TORCH_EXCEPTIONS = {
    "store/c10d_store", "store/c10d/c10d_store",  # the adapters to and from c10d::Store
}

UMBRELLA = "muster/muster.h"
TORCH_FOLDERS = ("torch/", "ATen/", "c10/", "caffe2/", "fmt/")  # fmt comes with libtorch
MOST_LINES = 500
CODE_FOLDERS = ("src", "include", "tools", "tests", "bench", "examples", "python")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SOURCES = {".h", ".hpp", ".cpp", ".cc", ".inc", ".ipp"}
CODE = SOURCES | {".py", ".pml", ".sh"}


class Place:
    """Where a source file stands: "src/comm/group.h" and "include/muster/comm/group.h" are both comm/group.h."""

    def __init__(self, path):
        self.path = re.sub(r"^(src|include/muster|muster)/", "", path)
        self.layer, *inside = self.path.split("/")
        self.public = self.path != path and not path.startswith("src/")
        rooms = ROOMS.get(self.layer) if not self.public else None
        self.has_room = rooms is None or (len(inside) > 1 and inside[0] in rooms)
        self.room = rooms.index(inside[0]) if rooms and self.has_room else -1
        self.stem = re.sub(r"\.[a-z]+$", "", self.path)
        self.may_see_torch = self.layer not in NO_TORCH or self.stem in TORCH_EXCEPTIONS


def sibling(root, place):
    """("parallel", "ddp") for parallel/ddp/replica.h and for parallel/ddp.h; None for what is in no sibling's folder."""
    for folder, names in SIBLINGS.items():
        if place.stem.startswith(folder + "/"):
            name = place.stem[len(folder) + 1:].split("/")[0]
            if (names is None or name in names) and any((root / top / folder / name).is_dir() for top in ("src", "include/muster")):
                return folder, name
    return None


def resolve(root, path, target):
    """The path from the root of a file that `path` includes by a relative name; other names as they are."""
    beside = (path.parent / target).resolve()
    return beside.relative_to(root).as_posix() if beside.is_file() and beside.is_relative_to(root) else target


def problem_with(root, file, target):
    """What is wrong with the file at Place `file` including `target`, or None."""
    if target.startswith(TORCH_FOLDERS):
        return None if file.may_see_torch else (
            f"layer {file.layer} must not include libtorch; move what needs it to a later layer")
    if target == UMBRELLA:
        return "the umbrella header brings every layer; include the headers that you need"
    included = Place(target)
    if included.layer not in ORDER:
        return f"'{included.layer}' is not a layer; the layers are {', '.join(LAYERS)}" if target.startswith("muster/") else None
    if ORDER[included.layer] > ORDER[file.layer]:
        return f"layer {file.layer} comes before {included.layer} and must not include it"
    if included.may_see_torch and not file.may_see_torch:
        return f"layer {file.layer} must not include {included.path}, which brings libtorch"
    ours, theirs = sibling(root, file), sibling(root, included)
    if ours and theirs and ours[0] == theirs[0] and ours != theirs:
        return f"{'/'.join(ours)} and {'/'.join(theirs)} are siblings and must not include each other"
    if included.layer == file.layer and included.room > file.room:
        where = f"room {ROOMS[file.layer][file.room]}" if file.room >= 0 else "a public header"
        return f"{where} of {file.layer} comes before room {ROOMS[file.layer][included.room]} and must not include it"
    return None


def sources(root):
    for folder in ("src", "include/muster", "tools"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                yield path


def check(root):
    """The violations below `root`, as lines of text, and the number of files read."""
    problems, count = [], 0
    for path in sources(root):
        count += 1
        shown = path.relative_to(root).as_posix()
        if shown == f"include/{UMBRELLA}":
            continue
        place = Place(shown)
        if place.layer not in ORDER:
            problems.append(f"{shown}:1: '{place.layer}' is not a layer; the layers are {', '.join(LAYERS)}")
            continue
        if not place.has_room:
            problems.append(f"{shown}:1: not in a room of {place.layer}; the rooms are {', '.join(ROOMS[place.layer])}")
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            target = match and (resolve(root, path, match[2]) if match[1] == '"' else match[2])
            if problem := target and problem_with(root, place, target):
                problems.append(f"{shown}:{number}: includes {match[2]}: {problem}")
    return problems, count


def too_long(root):
    """A line of text for each file of code that has too many lines."""
    paths = [path for folder in CODE_FOLDERS for path in sorted((root / folder).rglob("*")) if path.suffix in CODE]
    for path in [root / "dev", *paths]:
        if path.is_file():
            lines = path.read_bytes().count(b"\n")
            if lines > MOST_LINES:
                yield f"{path.relative_to(root).as_posix()}:{lines}: more than {MOST_LINES} lines; make two files of it"


def main(arguments):
    if len(arguments) > 1 or any(a.startswith("-") for a in arguments):
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parent.parent
    problems, count = check(root.resolve())
    if count == 0:
        print(f"check_layers: no sources in {root}", file=sys.stderr)
        return 2
    problems += too_long(root)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"check_layers: {count} files, {len(problems)} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
