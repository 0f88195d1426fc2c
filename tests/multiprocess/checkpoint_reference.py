"""What a Python program does with files of muster checkpoint convert. For each line, a word and a folder:

state FOLDER prints the shapes of the tensors in model.pt, and writes python.pt, more.pt, code.pt and text.pt.
newer FOLDER prints the tensors in newer.pt, and writes newer-too.pt. Their dtypes have no class of storages.
odd FOLDER writes files that torch.save() does not write every day, and some that it never writes.
"""
import copy
import os
import sys
import zipfile

import torch


class Code:
    def __reduce__(self):
        return (os.getcwd, ())


def state(folder):
    model = torch.load(folder + "model.pt", weights_only=True)
    print(*model["weight"].shape, *model["bias"].shape, flush=True)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.arange(6).view(2, 3))
    torch.save(net.state_dict(), folder + "python.pt")
    whole = torch.arange(5, dtype=torch.float)
    view = whole[1:5:2]
    torch.save({"view": view, "again": view, "half": torch.ones(2, dtype=torch.bfloat16),
                "nested": {"inner": torch.tensor(7)}, "scalar": torch.tensor(1.5), "empty": torch.ones(0, 3), "complex": torch.full((2,), 1 - 1j),
                "parameter": torch.nn.Parameter(torch.full((2,), 5.0))}, folder + "more.pt")
    torch.save({"f": Code()}, folder + "code.pt")
    torch.save({"epoch": "seven"}, folder + "text.pt")


def newer(folder):
    tensors = torch.load(folder + "newer.pt", weights_only=True)
    print(*tensors["u16"].tolist(), *tensors["u64"].tolist(), *tensors["f8"].float().tolist(),
          *tensors["empty"].shape, flush=True)
    torch.save({"u32": torch.tensor([7, 2 ** 31], dtype=torch.uint32), "f8": torch.tensor([0.5]).to(torch.float8_e5m2)},
               folder + "newer-too.pt")


def rewritten(source, target, compression=zipfile.ZIP_STORED, changes={}):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changes.get(name.split("/", 1)[1], old.read(name)))


def odd(folder):
    z = torch.tensor([1 + 2j, 3 + 4j])
    torch.save({"conj": z.conj()}, folder + "conj.pt")
    torch.save({"neg": z.conj().imag}, folder + "neg.pt")
    torch.save({"wide": torch.ones(1).expand(1 << 36)}, folder + "wide.pt")
    parameter, tensor = torch.nn.Parameter(torch.ones(2)), torch.full((2,), 2.0)
    parameter.note = tensor.note = "seven"
    buffer = torch.nn.Buffer(torch.full((2,), 3.0))
    torch.save({"parameter": parameter, "tensor": tensor, "buffer": buffer}, folder + "notes.pt")
    torch.save({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}, folder + "names.pt")
    torch.save({"a": torch.ones(1000)}, folder + "plain.pt")
    torch.save({"a": torch.ones(1)}, folder + "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save({"a": torch.ones(1)}, folder + "protocol-0.pt", pickle_protocol=0)
    torch.save({"a": b"seven"}, folder + "bytes.pt", pickle_protocol=4)
    torch.save(torch.nn.Linear(2, 2), folder + "module.pt")
    plain = folder + "plain.pt"
    rewritten(plain, folder + "big.pt", changes={"byteorder": b"big"})
    rewritten(plain, folder + "compressed.pt", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(folder + "bomb.pt", "w") as new:  # the reader inflates the version first
        for name in old.namelist():
            is_version = name.endswith("/version")
            new.writestr(name, b"3\n" + b" " * (1 << 20) if is_version else old.read(name), zipfile.ZIP_DEFLATED if is_version else zipfile.ZIP_STORED)
    with open(plain, "rb") as old, open(folder + "cut.pt", "wb") as new:
        new.write(old.read()[:-30])
    # Two entries of the archive for the same bytes.
    torch.save({"a": torch.ones(1000), "b": torch.ones(1000)}, folder + "two.pt")
    with zipfile.ZipFile(folder + "two.pt") as old, zipfile.ZipFile(folder + "overlapping.pt", "w") as new:
        for name in old.namelist():
            if not name.endswith("data/1"):
                new.writestr(name, old.read(name))
        prefix = old.namelist()[0].split("/")[0]
        again = copy.copy(new.getinfo(prefix + "/data/0"))
        again.filename = prefix + "/data/1"
        new.filelist.append(again)


def main():
    for line in sys.stdin:
        word, folder = line.strip().split(" ", 1)
        {"state": state, "newer": newer, "odd": odd}[word](folder)


if __name__ == "__main__":
    main()
