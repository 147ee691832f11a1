"""Real small models: tokens of a patched model equal its own, past the window of those that have one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import pagedkv

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from _models import find_model


def load(name, dtype):
    directory = find_model(name)
    if directory is None:
        pytest.skip(f"{name} is not prepared: run `python examples/_models.py {name}`")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def ragged(lengths):
    generator = torch.Generator().manual_seed(0)
    width = max(lengths)
    ids = torch.randint(1000, 20_000, (len(lengths), width), generator=generator)
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "lengths", "dtype"),
    [("smollm2", [24, 7, 40], torch.bfloat16), ("gemma3", [524, 40], torch.float32)],
    ids=["smollm2", "gemma3"],
)
def test_tokens(name, lengths, dtype):
    model, inputs = load(name, dtype), ragged(lengths)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    native = model.generate(**inputs, **options)
    pagedkv.patch(model, num_blocks=256)
    paged = model.generate(**inputs, **options)
    pool = pagedkv.pool(model)
    assert pool.peak_used_blocks > 0
    assert pool.used_blocks == 0
    if dtype == torch.float32:
        assert torch.equal(native, paged)
        return
    start = inputs["input_ids"].shape[1]
    for row, length in enumerate(lengths):
        differs = native[row, start:] != paged[row, start:]
        if differs.any():  # in bfloat16 only where the two best logits are a near-tie
            real = native[row, start - length : start + int(differs.int().argmax())]
            with torch.no_grad():
                top = model(real[None]).logits[0, -1].float().topk(2).values
            assert top[0] - top[1] < 0.25
