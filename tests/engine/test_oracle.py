"""Greedy tokens equal native generate, whatever the schedule does to a request."""

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from .oracle import assert_native, native, prompts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 20, "max_num_batched_tokens": 16},
        {"num_blocks": 20, "max_num_batched_tokens": 16, "num_host_blocks": 40},
        {"num_blocks": 20, "prefix_caching": False, "watermark": 0.0},
        {"max_num_seqs": 1, "max_num_batched_tokens": 8},
        {"block_size": 16, "max_num_batched_tokens": 9},
    ],
    ids=["roomy", "preempted", "swapped", "uncached", "one at a time", "chunked"],
)
def test_tokens_are_those_of_generate(llama, make_engine, options):
    engine = make_engine(llama, **options)
    results = engine.generate(prompts(14, 1, 40), max_new_tokens=24)
    assert_native(llama, results, max_new_tokens=24)
    stats = engine.stats()
    if options.get("num_blocks") == 20:
        assert stats.num_preemptions > 0
        assert (stats.kv.num_swaps > 0) == ("num_host_blocks" in options)
    if options.get("max_num_batched_tokens", 64) < 40:
        assert stats.num_steps > 24 + 14 * 20 // engine.scheduler.max_num_batched_tokens // 2


def test_shared_prefixes_are_computed_once(llama, make_engine):
    engine = make_engine(llama, num_blocks=128)
    system = prompts(1, 33, 33, seed=5)[0]
    asked = [system + tail for tail in prompts(8, 1, 9, seed=6)]
    first = engine.generate(asked[:1], max_new_tokens=8)
    rest = engine.generate(asked[1:], max_new_tokens=8)
    assert first[0].num_cached_tokens == 0
    assert all(result.num_cached_tokens >= 32 for result in rest)
    assert_native(llama, first + rest, max_new_tokens=8)


def test_salted_requests_share_nothing(llama, make_engine):
    engine = make_engine(llama)
    prompt = prompts(1, 20, 20)[0]
    cached = [
        engine.generate([prompt], max_new_tokens=2, cache_salt=salt)[0].num_cached_tokens for salt in ("a", "b", "a")
    ]
    assert cached == [0, 0, 16]


def test_changed_weights_are_not_served_from_old_prefixes(make_engine):
    from .conftest import build_llama

    model = build_llama()
    engine = make_engine(model)
    prompt = prompts(1, 20, 20)[0]
    engine.generate([prompt], max_new_tokens=4)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
    again = engine.generate([prompt], max_new_tokens=4)
    assert again[0].num_cached_tokens == 0
    assert_native(model, again, max_new_tokens=4)


def test_aborts_in_between_leave_the_others_alone(llama, make_engine):
    engine = make_engine(llama, num_blocks=24, max_num_batched_tokens=16)
    ids = [engine.add_request(prompt, max_new_tokens=20) for prompt in prompts(12, 3, 30, seed=3)]
    finished = {}
    for step in range(1000):
        for result in engine.step().finished:
            finished[result.request_id] = result
        if step % 4 == 0 and step // 4 < 6:
            engine.abort(ids[2 * (step // 4)])
        if len(finished) == len(ids):
            break
    results = list(finished.values())
    aborted = [result for result in results if result.finish_reason == "abort"]
    assert aborted
    for result in aborted:
        expected = native(llama, result.prompt_ids, max_new_tokens=20, do_sample=False)
        assert result.token_ids == expected[: len(result.token_ids)]
    assert_native(llama, [result for result in results if result not in aborted], max_new_tokens=20)


def _mistral():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=9, initializer_range=0.3, eos_token_id=None, max_position_embeddings=512,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def _gemma3():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=7, initializer_range=0.3, eos_token_id=None,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        max_position_embeddings=512, final_logit_softcapping=30.0,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def _gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=512, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def _gemma3n():
    """Its last two layers attend over the keys of earlier ones."""
    torch.manual_seed(0)
    config = Gemma3nTextConfig(
        vocab_size=101, vocab_size_per_layer_input=101, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        sliding_window=7, initializer_range=0.3, eos_token_id=None, num_kv_shared_layers=2, max_position_embeddings=512,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4, laurel_rank=4,
    )  # fmt: skip
    return Gemma3nForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("build", "num_blocks"),
    [(_mistral, 16), (_gemma3, 70), (_gemma3n, 40), (_gpt2, 30)],
    ids=["windowed", "four groups", "shared keys", "learned positions"],
)
def test_other_families(make_engine, build, num_blocks):
    model = build()
    engine = make_engine(model, num_blocks=num_blocks, max_num_batched_tokens=24)
    results = engine.generate(prompts(10, 1, 40, seed=7), max_new_tokens=20)
    assert_native(model, results, max_new_tokens=20)
    assert engine.stats().num_preemptions > 0


def test_a_patched_model_can_be_served(make_engine):
    import pagedkv

    from .conftest import build_llama

    model = pagedkv.patch(build_llama(), num_blocks=64)
    engine = make_engine(model)
    results = engine.generate(prompts(4, 1, 20), max_new_tokens=8)
    assert_native(pagedkv.unpatch(model), results, max_new_tokens=8)


def test_blocks_may_hold_another_float_type(llama, make_engine):
    engine = make_engine(llama, kv_dtype=torch.bfloat16)
    results = engine.generate(prompts(4, 5, 20), max_new_tokens=8)
    assert all(len(result.token_ids) == 8 and result.error is None for result in results)
    cache = engine.runner.cache.paged[0].key_cache
    assert cache.dtype == torch.bfloat16
