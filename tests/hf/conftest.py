"""Tiny models on one thread, as more only wait for one another, and a CUDA device in name."""

import pytest
import torch
from recorded_graphs import RecordedGraph, recording

from pagedkv.hf import compiling, patching


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _embedding(monkeypatch):
    """What ``Computed`` replaces comes back."""
    monkeypatch.setattr(torch.nn.functional, "embedding", torch.nn.functional.embedding)


@pytest.fixture
def device(monkeypatch):
    """A CUDA device in name; the launches of its graphs."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "memory")
    launched = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: RecordedGraph(launched))
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(patching, "can_capture", lambda model: True)
    monkeypatch.setattr(compiling, "_can_freeze", lambda model: False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return launched
