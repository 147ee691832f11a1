"""What a patched model with a prefix cache must give: native tokens, whatever changed since the last call."""

from __future__ import annotations

import torch
from models import Computed

import pagedkv
from pagedkv.hf.handle import ATTRIBUTE

PROMPT = {"input_ids": torch.arange(2, 43)[None], "attention_mask": torch.ones(1, 41, dtype=torch.long)}
HIT = 1  # token that the first forward computes where the 40 before it are found


def patch(model):
    return pagedkv.patch(model, num_blocks=256, block_size=4, prefix_caching=True)


def patch_of(model):
    return model.__dict__[ATTRIBUTE]


def generate(model, **kwargs):
    return model.generate(**{**PROMPT, "max_new_tokens": 6, "do_sample": False, **kwargs})


def computed(model, **kwargs):
    """Tokens of a call, and how many its first forward computed."""
    counts = Computed(model)
    return generate(model, **kwargs), counts.take()[0]


def assert_computes(model, expected, width, **kwargs):
    tokens, count = computed(model, **kwargs)
    assert torch.equal(tokens, expected)
    assert count == width


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
    for before, native, change in zip([None, *expected], expected, (None, *changes), strict=False):
        if change is not None:
            change(model)
            assert not torch.equal(native, before), "the change changes nothing"
        assert_computes(model, native, 41)
        assert_computes(model, native, HIT)
    assert pagedkv.pool(model).used_blocks == 0
