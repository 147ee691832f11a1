"""Tiny models: more threads only wait for one another."""

import pytest
import torch


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
