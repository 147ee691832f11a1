"""CUDA graphs for machines without CUDA: what a capture ran is run again."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """A CUDA graph in name: the ops of a capture, made again on the same tensors by a replay."""

    def __init__(self, launched):
        super().__init__()
        self.ops, self.launched = [], launched

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.ops.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        self.launched.append("replay")
        for function, args, kwargs, result in self.ops:
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if torch.is_tensor(old) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def recording(graph, pool):
    with graph:
        yield
