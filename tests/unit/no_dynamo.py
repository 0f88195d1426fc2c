"""Importing this, before an optimizer is made, saves the seconds in which PyTorch imports its compiler.

Optimizers only ask torch._dynamo not to compile them, but its import takes longer than that of torch. Here a module takes
its place that agrees to that. Who asks it for more gets the real one.
"""
import importlib
import sys
import types

import torch

NAME = "torch._dynamo"


def real(attribute):
    if sys.modules.get(NAME) is stand_in:
        del sys.modules[NAME], torch._dynamo
    return getattr(importlib.import_module(NAME), attribute)


stand_in = types.ModuleType(NAME)
stand_in.disable = lambda fn=None, recursive=True, **_: fn
stand_in.graph_break = lambda *_, **__: None
stand_in.__getattr__ = real
if NAME not in sys.modules:
    sys.modules[NAME] = torch._dynamo = stand_in
