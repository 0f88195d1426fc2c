"""What a Python program does with files of muster checkpoint convert. For each line, a folder with model.pt:

prints the shapes of the tensors in model.pt, and writes python.pt, more.pt and text.pt.
"""
import os
import sys

import torch


class Code:
    def __reduce__(self):
        return (os.getcwd, ())


def main():
    for line in sys.stdin:
        folder = line.strip()
        state = torch.load(folder + "model.pt", weights_only=True)
        print(*state["weight"].shape, *state["bias"].shape, flush=True)
        net = torch.nn.Sequential(torch.nn.Linear(3, 2))
        with torch.no_grad():
            net[0].weight.copy_(torch.arange(6).view(2, 3))
        torch.save(net.state_dict(), folder + "python.pt")
        whole = torch.arange(5, dtype=torch.float)
        view = whole[1:5:2]
        torch.save({"view": view, "again": view, "half": torch.ones(2, dtype=torch.bfloat16), "nested": {"inner": torch.tensor(7)},
                    "scalar": torch.tensor(1.5), "empty": torch.ones(0, 3), "complex": torch.full((2,), 1 - 1j),
                    "parameter": torch.nn.Parameter(torch.full((2,), 5.0))}, folder + "more.pt")
        torch.save({"f": Code()}, folder + "code.pt")
        torch.save({"epoch": "seven"}, folder + "text.pt")


if __name__ == "__main__":
    main()
