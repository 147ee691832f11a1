"""Quantised keys and values under patch, PagedCache and Engine, against native caches that round what they take in."""

from __future__ import annotations

import pytest
import torch
from models import generate, ragged, tiny, with_cache
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

import pagedkv
from pagedkv.engine import compiling

TYPES = {
    "int8": (torch.int8, 127.0),
    "fp8_e4m3": (torch.float8_e4m3fn, 448.0),
    "fp8_e5m2": (torch.float8_e5m2, 57344.0),
}
EVERY_TYPE = pytest.mark.parametrize("kv_dtype", TYPES)


def rounded(states, kv_dtype):
    """[B, H, L, D] as they come out of a quantised cache."""
    dtype, largest = TYPES[kv_dtype]
    scale = states.abs().amax(-1, keepdim=True) / largest
    quotient = torch.where(scale == 0, 0.0, states / scale)
    return (quotient.round() if dtype == torch.int8 else quotient.to(dtype).float()) * scale


@pytest.fixture
def native(monkeypatch):
    """``native(kv_dtype)``: from now on transformers' own caches round."""

    def install(kv_dtype):
        for layer in (DynamicLayer, DynamicSlidingWindowLayer):
            update = layer.update

            def rounding(self, key, value, *args, _update=update, **kwargs):
                return _update(self, rounded(key, kv_dtype), rounded(value, kv_dtype), *args, **kwargs)

            monkeypatch.setattr(layer, "update", rounding)

    return install


@EVERY_TYPE
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_patched_generate_gives_the_tokens_of_rounded_keys_and_values(kv_dtype, family, options, native):
    """Windows, beams, whose blocks are copied with their scales, and samples of one prompt."""
    model, inputs = tiny(family), ragged([11, 3, 7])
    with pagedkv.patched(model, block_size=4, num_blocks=256, kv_dtype=kv_dtype):
        torch.manual_seed(1)
        got = generate(model, inputs, **options)
        assert set(pagedkv.layer_modes(model)) == {"paged"}
    native(kv_dtype)
    torch.manual_seed(1)
    assert torch.equal(got, generate(model, inputs, **options))


def test_compiled_generate_and_prefix_hits(native):
    kv_dtype = "fp8_e4m3"  # the graph of another type has other numbers, and nothing else
    model, inputs = tiny(num_hidden_layers=1), ragged([19, 19])
    results = []
    with pagedkv.patched(model, block_size=4, num_blocks=256, kv_dtype=kv_dtype, prefix_caching=True, compile=True):
        results += [generate(model, inputs) for _ in range(2)]
        assert pagedkv.pool(model).manager.stats().hit_rate > 0
    native(kv_dtype)
    for got in results:
        assert torch.equal(got, generate(model, inputs))


@pytest.mark.parametrize(
    ("kv_dtype", "options"),
    [
        *((kv_dtype, options) for kv_dtype in TYPES for options in ({}, {"num_host_blocks": 32, "num_blocks": 14})),
        ("int8", {"compile": True}),
    ],
    ids=str,
)
def test_engine_gives_the_tokens_of_rounded_keys_and_values(kv_dtype, options, native, monkeypatch):
    """Chunks, decode and, with few blocks, swaps to the host, which take the scales with them."""
    model, prompts = tiny(num_hidden_layers=1), [row.tolist() for row in ragged([17, 17, 17])["input_ids"]]
    monkeypatch.setitem(compiling._CPU_OPTIONS, "max_autotune_gemm", False)  # which takes most of the time
    settings = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, **options}
    with pagedkv.Engine(model, block_size=4, kv_dtype=kv_dtype, **settings) as engine:
        results = engine.generate(prompts, max_new_tokens=10)
        if "num_host_blocks" in options:
            assert engine.manager.stats().num_swaps > 0
    native(kv_dtype)
    for prompt, result in zip(prompts, results, strict=True):
        ids = torch.tensor([prompt])
        expected = generate(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert result.token_ids == expected[0, len(prompt) :].tolist()


@EVERY_TYPE
def test_gathered_layers_store_quantised_and_gather_dequantised(kv_dtype, native):
    """All that a forward gathers is rounded; the first one, which gathers nothing, sees keys as they are."""
    model, ids = tiny("bloom", hidden_size=64, n_layer=2, n_head=4), ragged([6])["input_ids"]
    logits = []
    with torch.no_grad(), pagedkv.patched(model, block_size=4, num_blocks=64, kv_dtype=kv_dtype):
        cache = pagedkv.PagedCache(model.config, pool=pagedkv.pool(model))
        logits += [model(tokens, **with_cache(model, cache)).logits for tokens in (ids, ids[:, :1])]
        assert set(cache.layer_modes) == {"gathered"}
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        expected = [model(ids, **with_cache(model, cache)).logits]
        for layer in cache.layers:
            layer.keys, layer.values = rounded(layer.keys, kv_dtype), rounded(layer.values, kv_dtype)
        native(kv_dtype)
        expected.append(model(ids[:, :1], **with_cache(model, cache)).logits)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@EVERY_TYPE
def test_a_pool_speaks_of_the_real_bytes(kv_dtype):
    model, heads, head_size = tiny(), 2, 16
    with pagedkv.patched(model, block_size=4, num_blocks=64, kv_dtype=kv_dtype):
        generate(model, ragged([5]))
        pool = pagedkv.pool(model)
        assert pool.kv_dtype == TYPES[kv_dtype][0]
        assert pool.block_bytes == 3 * 4 * heads * 2 * (head_size + 4)  # layers, tokens, heads, K and V, scales


@pytest.mark.parametrize("value", ["int4", "bfloat16", torch.float64, 8])
def test_other_types_are_refused_by_name(value):
    model = tiny()
    for build in (
        lambda: pagedkv.patch(model, kv_dtype=value),
        lambda: pagedkv.Engine(model, kv_dtype=value),
        lambda: pagedkv.PagedCache(model.config, kv_dtype=value),
    ):
        with pytest.raises(ValueError, match=r"^kv_dtype: expected torch.float32, .*'int8', 'fp8_e4m3' or 'fp8_e5m2'"):
            build()
