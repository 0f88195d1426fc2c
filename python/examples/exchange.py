"""A checkpoint of Muster's opened in Python, and one from Python that C++ loads, with examples/checkpoint/exchange.cpp.

    checkpoint_exchange write run1                   # C++ trains, and leaves run1/step-20.snapshot.safetensors
    python exchange.py read run1                     # prints the same outputs
    python exchange.py write weights.safetensors     # Python trains
    checkpoint_exchange read weights.safetensors     # prints the outputs that Python has printed

The library safetensors reads and writes the files (pip install safetensors). Without it, this script does so itself.
"""
from __future__ import annotations

import json
import pathlib
import sys

import torch

try:
    from safetensors.torch import load_file, save_file
except ImportError:  # The format: the length of a JSON header, the header, and the tensors' bytes.
    DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool}

    def load_file(path):
        data = pathlib.Path(path).read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        tensors = {}
        for name, of in json.loads(data[8:begin]).items():
            if name != "__metadata__":
                first, end = (begin + offset for offset in of["data_offsets"])
                some = torch.tensor(list(data[first:end]), dtype=torch.uint8)
                tensors[name] = some.view(DTYPES[of["dtype"]]).view(of["shape"])
        return tensors

    def save_file(tensors, path):
        header, data = {}, b""
        for name, tensor in tensors.items():
            dtype = next(key for key, value in DTYPES.items() if value == tensor.dtype)
            end = len(data) + tensor.nbytes
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), end]}
            data += bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        text = json.dumps(header).encode()
        pathlib.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + data)


def make_net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


def print_outputs(net: torch.nn.Module) -> None:
    with torch.no_grad():
        print("outputs:", *(f"{number:.6f}" for number in net(inputs()).flatten().tolist()))


def read(folder: str) -> None:
    files = pathlib.Path(folder).glob("step-*.snapshot.safetensors")
    newest = max(files, key=lambda path: int(path.name.split(".")[0].removeprefix("step-")))
    tensors = load_file(newest)
    net = make_net()
    net.load_state_dict({name.removeprefix("net/"): one for name, one in tensors.items() if name.startswith("net/")})
    print_outputs(net)


def write(file: str) -> None:
    torch.manual_seed(2)
    net = make_net()
    adamw = torch.optim.AdamW(net.parameters(), lr=0.05)
    for _ in range(20):
        adamw.zero_grad()
        (net(inputs()) - 1).square().mean().backward()
        adamw.step()
    save_file({name: tensor.detach() for name, tensor in net.state_dict().items()}, file)
    print_outputs(net)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("read", "write"):
        sys.exit(__doc__)
    {"read": read, "write": write}[sys.argv[1]](sys.argv[2])
