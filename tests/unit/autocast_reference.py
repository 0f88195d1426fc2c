"""Python's autocast in a transformer's layer, for unit/autocast_test.cpp.

Reads lines "mode|dtype|which|weights|results|operators": "eval" or "train"; "bfloat16" or "float16"; "python" for the
layer as it is, or "libtorch" for the operators of the one in C++; the file of the layer's parameters and of the input
x; where the output, and in training the gradients, are to be written; and where the operators are, one "name dtype" per
line, as TorchDispatchMode sees them. Answers each with 0.
"""
import sys

import torch
from optimizers_reference import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

COMPUTE_NOTHING = {"aten::clone", "aten::copy_", "aten::empty", "aten::empty_like", "aten::empty_strided",
                   "aten::_unsafe_view"}
DTYPES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half", torch.bool: "Bool"}


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        alias = schema.returns and schema.returns[0].alias_info
        if schema.returns and schema.name not in COMPUTE_NOTHING and (schema.is_mutable or not alias):
            results = result if isinstance(result, (list, tuple)) else [result]
            tensors = [one for one in results if isinstance(one, torch.Tensor)]
            if tensors:
                self.seen.append(f"{schema.name} {DTYPES[tensors[0].dtype]}")
        return result


class LayerOfLibtorch(torch.nn.TransformerEncoderLayer):
    """Its attention computes the weights, which the fused one does not."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        return self.dropout1(self.self_attn(x, x, x, need_weights=True)[0])


def linear_of_libtorch(x, weight, bias):  # of an input with three dimensions, as all of the layer's are in C++
    y = x.matmul(weight.t())
    y += bias
    return y


def answer(mode, dtype, which, weights, results, operators):
    state = load_file(weights)
    x = state.pop("x").requires_grad_()
    width, feedforward = x.shape[2], state["linear1.bias"].shape[0]
    is_python = which == "python"
    torch.nn.functional.linear = torch._C._nn.linear if is_python else linear_of_libtorch
    layer = torch.nn.TransformerEncoderLayer if is_python else LayerOfLibtorch
    layer = layer(width, nhead=4, dim_feedforward=feedforward, dropout=0.0)
    layer.load_state_dict(state)
    layer.train(mode == "train")
    with Operators() as seen, torch.autocast("cpu", dtype=getattr(torch, dtype)):
        y = layer(x)
    found = {"y": y.detach()}
    if mode == "train":
        y.square().sum().backward()
        found |= {name: parameter.grad for name, parameter in layer.named_parameters()} | {"x": x.grad}
    save_file(found, results)
    with open(operators, "w") as file:
        file.write("\n".join(seen.seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        answer(*line.rstrip("\n").split("|"))
        print(0)
