"""What a Python program does with safetensors files. For each line:

read PATH    prints all values of all tensors, in the order of their names
merge PATH   prints how many of the folder's files have tensors, and all values of all tensors, in the order of their names,
             of which each must be in one file only
states PATH  prints, of the same tensors, all values of those that an Adam keeps, without how many files there are
write PATH   writes a file in which tensors are not aligned, and one by the safetensors library beside it, if that is there
"""

import json
import struct
import sys
from pathlib import Path

import torch

try:
    from safetensors.torch import load_file, save_file
except ImportError:  # the format is simple enough to be read without
    load_file = None

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool}


def read(path):
    with open(path, "rb") as file:
        data = bytearray(file.read())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        begin, end = tensor["data_offsets"]
        values = data[8 + length + begin : 8 + length + end]
        flat = torch.frombuffer(values, dtype=DTYPES[tensor["dtype"]]) if values else torch.empty(0)
        tensors[name] = flat.reshape(tensor["shape"])
    return tensors


def write(path):
    header = {
        "__metadata__": {"by": "python"},
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [1, 5]},
        "c": {"dtype": "F32", "shape": [1, 2], "data_offsets": [5, 13]},
    }
    text = json.dumps(header).encode()
    halves = torch.tensor([0.5, -3.0], dtype=torch.bfloat16).view(torch.int16).tolist()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + struct.pack("<Bhhff", 7, *halves, 0.25, 4))
    if load_file:
        save_file({"weight": torch.full((3, 2), 2.0), "bias": torch.arange(3.0)}, path + ".library")


def load(path):
    tensors = read(path)
    if load_file:
        same = load_file(path)
        assert same.keys() == tensors.keys()
        assert all(torch.equal(same[name], tensors[name]) for name in same)
    return tensors


def merge(folder):
    parts = [part for part in (load(str(path)) for path in Path(folder).glob("*.safetensors")) if part]
    names = [name for part in parts for name in part]
    assert len(set(names)) == len(names), names
    return len(parts), {name: tensor for part in parts for name, tensor in part.items()}


for line in sys.stdin:
    what, path = line.split()
    if what == "write":
        write(path)
        print()
        continue
    count, tensors = merge(path) if what in ("merge", "states") else (None, load(path))
    if what == "states":
        count, tensors = None, {name: t for name, t in tensors.items() if name.split("/")[-1] in ("exp_avg", "exp_avg_sq")}
    values = [value for name in sorted(tensors) for value in tensors[name].double().flatten().tolist()]
    print(*([] if count is None else [count]), *values)
