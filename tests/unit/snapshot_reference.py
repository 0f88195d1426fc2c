"""What a Python program reads from a safetensors file: for each line, a path, all values of all tensors in the order of their names."""

import json
import struct
import sys

import torch

try:
    from safetensors.torch import load_file
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


for line in sys.stdin:
    path = line.strip()
    tensors = read(path)
    if load_file:
        same = load_file(path)
        assert same.keys() == tensors.keys()
        assert all(torch.equal(same[name], tensors[name]) for name in same)
    print(*[value for name in sorted(tensors) for value in tensors[name].double().flatten().tolist()])
