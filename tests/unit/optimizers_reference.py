"""Python's torch.optim goes on where muster::TorchOptimizer was, for unit/optimizers_test.cpp.

Reads lines "name|file|file|groups": the class, what state_dict() gave, with the parameters besides, where the same is to
be written after ten more steps, and 1 if the second parameter has a group of its own, the last one. docs/optim.md has state_of() and state_dict_of().
"""
import json
import sys

import torch
from optim_reference import give_gradients

DTYPES = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
# What LBFGS has besides tensors: lists of vectors, which are rows of a tensor in a file, and numbers.
LISTS, NUMBERS = ("old_dirs", "old_stps", "ro"), ("func_evals", "n_iter", "t", "prev_loss")


def load_file(path):  # as safetensors.torch.load_file, which is not everywhere
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    tensors = {}
    for name, of in header.items():
        if name != "__metadata__":
            begin, end = of["data_offsets"]
            values = bytearray(data[begin:end])
            flat = torch.frombuffer(values, dtype=DTYPES[of["dtype"]]) if values else torch.empty(0, dtype=DTYPES[of["dtype"]])
            tensors[name] = flat.view(of["shape"])
    return tensors


def save_file(tensors, path):
    header, data = {}, b""
    for name, tensor in tensors.items():
        dtype = next(key for key, value in DTYPES.items() if value == tensor.dtype)
        end = len(data) + tensor.nbytes
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), end]}
        data += bytes(tensor.flatten().view(torch.uint8).tolist())
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)


def state_of(tensors, defaults):
    """torch.optim's state_dict of what muster's state_dict() gave. `defaults`: the options that only Python has."""
    state, groups = {}, {}
    for name, tensor in tensors.items():
        kind, number, what = name.split(".")
        if kind == "state":
            value = list(tensor) if what in LISTS else tensor.item() if what in NUMBERS else tensor
            state.setdefault(int(number), {})[what] = value
        elif kind == "param_groups" and what in defaults:
            value = tensor.tolist()
            value = tuple(value) if isinstance(value, list) else value
            if what == "eps" and isinstance(value, tuple) and value[0] == 0:  # Adafactor's default
                value = (None, value[1])
            if what == "line_search_fn":
                value = "strong_wolfe" if value else None
            if isinstance(defaults[what], int) and value == int(value):  # bool too
                value = type(defaults[what])(value)
            groups.setdefault(int(number), dict(defaults))[what] = value
    return state, [groups[i] for i in sorted(groups)]


def state_dict_of(optimizer):
    """What muster's load_state_dict() takes of torch.optim's state_dict."""
    tensors = {}
    dictionary = optimizer.state_dict()
    for number, state in dictionary["state"].items():
        for name, value in state.items():
            if name in LISTS and value is not None:
                width = [] if name == "ro" else [state["d"].numel()]
                value = torch.stack(value) if value else state["d"].new_empty([0, *width])
            if value is not None and name != "al":  # LBFGS writes it before it reads it
                tensors[f"state.{number}.{name}"] = torch.as_tensor(value, dtype=torch.double if isinstance(value, float) else None)
    for number, group in enumerate(dictionary["param_groups"]):
        for name, value in group.items():
            if name != "params" and isinstance(value, (float, int, tuple)) and name not in ("foreach", "capturable", "differentiable", "fused"):
                value = tuple(0.0 if each is None else each for each in value) if isinstance(value, tuple) else value
                tensors[f"param_groups.{number}.{name}"] = torch.tensor(value, dtype=torch.double)
        if "line_search_fn" in group:
            tensors[f"param_groups.{number}.line_search_fn"] = torch.tensor(float(group["line_search_fn"] is not None), dtype=torch.double)
    return tensors


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, source, target, grouped = line.strip().split("|")
        tensors = load_file(source)
        parameters = [tensors.pop(f"parameters.{i}").clone().requires_grad_() for i in range(3)]
        one, two, three = parameters
        optimizer = getattr(torch.optim, name)([{"params": [one, three]}, {"params": [two]}] if grouped == "1" else parameters)
        state, groups = state_of(tensors, optimizer.defaults)
        for group, own in zip(groups, optimizer.state_dict()["param_groups"], strict=True):
            group["params"] = own["params"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # leaves numbers of its own in the groups
        for step in range(10, 20):
            give_gradients(parameters, step)
            optimizer.step()
        tensors = state_dict_of(optimizer)
        tensors.update({f"parameters.{i}": parameter.detach() for i, parameter in enumerate(parameters)})
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, target)
        print(0, flush=True)


if __name__ == "__main__":
    main()
