"""PagedCache by itself: the library's own ways in, and the operations that generate asks of a cache."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from models import ragged, tiny, with_cache
from transformers import AutoModelForCausalLM

import pagedkv
import pagedkv.hf
from pagedkv.hf import attention


def forward(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=True, **with_cache(model, cache)).logits


@pytest.mark.parametrize(
    ("family", "entry"),
    [("llama", "from_config"), ("gemma3_text", "set_attn_implementation"), ("gpt_oss", "set_attn_implementation")],
)
def test_attn_implementation(family, entry):
    model, inputs = tiny(family), ragged([9, 4, 12])
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    if entry == "from_config":
        other = AutoModelForCausalLM.from_config(model.config, attn_implementation="pagedkv").eval()
        other.load_state_dict(model.state_dict())
        other.generation_config = model.generation_config
        model = other
    else:
        model.set_attn_implementation("pagedkv")
    cache = pagedkv.PagedCache(model.config, num_blocks=64, block_size=4)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False, **with_cache(model, cache))
    assert torch.equal(out, expected)
    assert cache.layer_modes == ["paged"] * 3
    assert cache.pool.used_blocks > 0
    pool = cache.pool
    del cache
    gc.collect()
    assert pool.used_blocks == 0


def test_without_a_paged_cache_attention_is_dense(caplog, monkeypatch):
    model, inputs = tiny("gemma2"), ragged([9, 4])
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("pagedkv")
    monkeypatch.setattr(attention, "_warned", False)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    assert caplog.text.count("without a PagedCache") == 1


def test_left_padding_stores_real_tokens_only():
    model, inputs = tiny("llama"), ragged([3, 5])
    model.set_attn_implementation("pagedkv")
    cache = pagedkv.PagedCache(model.config, num_blocks=16, block_size=4)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        logits = model(**inputs, position_ids=positions, **with_cache(model, cache)).logits
    assert [len(ids) for ids in cache.block_ids()] == [1, 2]
    assert cache.get_seq_length() == 5
    step = cache.state.step(0, torch.device("cpu"))
    assert step.slot_mapping.tolist()[:2] == [-1, -1]
    model.set_attn_implementation("eager")
    for row, length in enumerate([3, 5]):
        with torch.no_grad():
            alone = model(inputs["input_ids"][row : row + 1, 5 - length :]).logits[0, -1]
        assert (logits[row, -1] - alone).abs().max() < 1e-4


def test_padding_inside_rows_equals_each_row_alone():
    model = tiny("gemma3_text")  # window 6
    ids = torch.randint(2, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 5:9] = 0
    mask[1, :2] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    model.set_attn_implementation("pagedkv")
    cache = pagedkv.PagedCache(model.config, num_blocks=32, block_size=4)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, **with_cache(model, cache)).logits
    model.set_attn_implementation("eager")
    for row in range(2):
        with torch.no_grad():
            alone = model(ids[row : row + 1, mask[row].bool()]).logits[0]
        assert (logits[row, mask[row].bool()] - alone).abs().max() < 1e-4


def test_crop():
    model = tiny("llama")
    model.set_attn_implementation("pagedkv")
    cache = pagedkv.PagedCache(model.config, num_blocks=32, block_size=2)
    ids = torch.randint(2, 128, (1, 8))
    forward(model, cache, ids[:, :3])
    cache.crop(0)
    assert cache.get_seq_length() == 3
    cache.crop(-1)
    assert (cache.get_seq_length(), cache.pool.used_blocks) == (2, 1)
    twin = copy.deepcopy(cache)
    assert cache.pool.used_blocks == 1  # shared
    after = forward(model, cache, ids[:, 2:6])
    other = forward(model, twin, ids[:, 2:6].flip(1))
    expected = forward(model, None, ids[:, :6])[:, 2:]
    assert (after - expected).abs().max() < 1e-4
    assert (other - expected).abs().max() > 1e-2
    cache.crop(-50)
    assert cache.get_seq_length() == 0
    assert cache.block_ids() == [[]]
    cache.reset()
    twin.reset()
    assert cache.pool.used_blocks == 0
    cache.pool.manager.check_integrity()


def test_crop_into_a_shared_block_copies_it():
    model = tiny("llama")
    model.set_attn_implementation("pagedkv")
    cache = pagedkv.PagedCache(model.config, num_blocks=32, block_size=4)
    ids = torch.randint(2, 128, (1, 12))
    forward(model, cache, ids[:, :6])
    twin = copy.deepcopy(cache)
    twin.crop(-1)
    forward(model, twin, torch.full((1, 1), 9))
    expected = forward(model, None, ids)[:, 6:]
    assert (forward(model, cache, ids[:, 6:]) - expected).abs().max() < 1e-4


def test_batch_operations():
    model = tiny("llama")
    model.set_attn_implementation("pagedkv")
    cache = pagedkv.PagedCache(model.config, num_blocks=64, block_size=4)
    ids = ragged([7, 7, 7])["input_ids"]
    forward(model, cache, ids)
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 1, 1, 2]))
    rows = torch.tensor([2, 2, 0, 0])[[3, 1, 1, 2]]
    new = torch.randint(2, 128, (4, 3))
    expected = forward(model, None, torch.cat([ids[rows], new], 1))[:, 7:]
    assert (forward(model, cache, new) - expected).abs().max() < 1e-4
    cache.pool.manager.check_integrity()


def test_dense_mask_of_the_caller():
    model = tiny("llama")
    ids = torch.randint(2, 128, (1, 6))
    mask = torch.zeros(1, 1, 6, 6).masked_fill(
        ~torch.ones(6, 6, dtype=torch.bool).tril(), torch.finfo(torch.float32).min
    )
    mask[..., 1] = torch.finfo(torch.float32).min
    expected = forward(model, None, ids, mask)
    pagedkv.patch(model, num_blocks=32)
    cache = pagedkv.PagedCache(model.config, pool=pagedkv.pool(model))
    assert (forward(model, cache, ids, mask) - expected).abs().max() < 1e-4


def test_mask_that_does_not_continue_is_an_error():
    model, inputs = tiny("llama"), ragged([3, 5])
    pagedkv.patch(model, num_blocks=32)
    cache = pagedkv.PagedCache(model.config, pool=pagedkv.pool(model))
    forward(model, cache, inputs["input_ids"], inputs["attention_mask"])
    with pytest.raises(ValueError, match="5 cached columns included"):
        forward(model, cache, inputs["input_ids"], inputs["attention_mask"])
    with pytest.raises(ValueError, match="as it did when they were cached"):
        forward(model, cache, inputs["input_ids"], torch.ones(2, 10, dtype=torch.long))
    with pytest.raises(ValueError, match="batch must be 2"):
        forward(model, cache, inputs["input_ids"][:1])
