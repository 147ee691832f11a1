"""What a patched model with a prefix cache must give: native tokens, whatever changed since the last call."""

from __future__ import annotations

import torch
from models import Computed

import pagedkv

PROMPT = {"input_ids": torch.arange(2, 43)[None], "attention_mask": torch.ones(1, 41, dtype=torch.long)}


def patch(model):
    return pagedkv.patch(model, num_blocks=256, block_size=4, prefix_caching=True)


def generate(model, **kwargs):
    return model.generate(**{**PROMPT, "max_new_tokens": 6, "do_sample": False, **kwargs})


def natives(make, *changes):
    """The same by a twin that is never patched."""
    model = make()
    result = [generate(model)]
    for change in changes:
        change(model)
        result.append(generate(model))
    return result


def assert_identity(make, *changes):
    """Each change has another result, the patched model gives it, misses after each change, and hits when repeated."""
    expected = natives(make, *changes)
    model = patch(make())
    before = None
    for native, change in zip(expected, (None, *changes), strict=True):
        if change is not None:
            change(model)
            assert not torch.equal(native, before), "the change changes nothing"
        before = native
        computed = Computed(model)
        assert torch.equal(generate(model), native)
        assert computed.take()[0] == 41
        assert torch.equal(generate(model), native)
        assert computed.take()[0] == 1
    assert pagedkv.pool(model).used_blocks == 0
