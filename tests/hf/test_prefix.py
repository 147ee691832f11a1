"""Prefix caching across calls of generate: what is computed, and what a hit may depend on."""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext
from unittest import mock

import models
import pytest
import torch
from identities import patch, patch_of
from models import Computed, ragged, tiny, with_cache

import pagedkv

SYSTEM = torch.arange(2, 42)  # 10 blocks of 4


def prompts(*tails):
    """Rows that begin with the same 40 tokens, padded on the left."""
    rows = [torch.cat([SYSTEM, torch.tensor(tail)]) for tail in tails]
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.long), row]) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@contextmanager
def interrupted(module, calls=1):
    """KeyboardInterrupt in a module's n-th call, where nothing looks: under a hook no blocks are shared."""
    kind, done = type(module), []
    call = kind.__call__

    def count(self, *args, **kwargs):
        done.append(self is module)
        if self is module and sum(done) == calls:
            raise KeyboardInterrupt
        return call(self, *args, **kwargs)

    with mock.patch.object(kind, "__call__", count), pytest.raises(KeyboardInterrupt):
        yield


@pytest.fixture
def model():
    return tiny("llama")


def generate(model, inputs, **options):
    return models.generate(model, inputs, **{"max_new_tokens": 3, **options})


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_second_call_computes_the_rest(family):
    model = tiny(family)
    first, second = prompts([50, 51, 52]), prompts([60, 61])
    expected = generate(model, first), generate(model, second)
    patch(model)
    computed = Computed(model)
    assert torch.equal(generate(model, first), expected[0])
    assert computed.take()[0] == 43
    assert torch.equal(generate(model, second), expected[1])
    assert computed.take()[0] == 2
    assert pagedkv.pool(model).used_blocks == 0


def test_ragged_batch_skips_the_smallest_hit(model):
    warm, batch = prompts([50]), prompts([50, 51, 52, 53, 54, 55], [70])
    expected = generate(model, batch)
    patch(model)
    generate(model, warm)
    computed = Computed(model)
    assert torch.equal(generate(model, batch), expected)
    # columns are cut for all rows at once: 40 of the longer row's 46, so the other, padded by 5, skips 35
    assert computed.take()[0] == 6 + 6
    assert torch.equal(generate(model, batch, num_beams=2), generate(pagedkv.unpatch(model), batch, num_beams=2))


def test_answers_are_found_too(model):
    patch(model)
    inputs = prompts([50])
    out = generate(model, inputs, max_new_tokens=12)
    chat = {"input_ids": torch.cat([out, torch.tensor([[7]])], 1)}
    chat["attention_mask"] = torch.ones_like(chat["input_ids"])
    computed = Computed(model)
    got = generate(model, chat)
    assert computed.take()[0] == 54 - 52
    assert torch.equal(got, generate(pagedkv.unpatch(model), chat))


def test_clear_prefix_cache(model):
    patch(model)
    inputs = prompts([50])
    generate(model, inputs)
    pagedkv.clear_prefix_cache(model)
    computed = Computed(model)
    generate(model, inputs)
    generate(model, inputs)
    assert [computed.calls[0], computed.calls[3]] == [41, 1]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("where", ["embedding", "first layer", "last layer"])
def test_a_prefill_that_failed_leaves_nothing_to_find(family, where):
    model = tiny(family)
    inputs = prompts([50, 51, 52])
    expected = generate(model, inputs)
    patch(model)
    layers = model.model.layers
    module = {"embedding": model.get_input_embeddings(), "first layer": layers[0], "last layer": layers[-1]}[where]

    with interrupted(module):
        generate(model, inputs)
    computed = Computed(model)
    assert torch.equal(generate(model, inputs), expected)
    assert computed.take()[0] == 43
    assert torch.equal(generate(model, inputs), expected)
    assert computed.take()[0] < 43
    assert pagedkv.pool(model).used_blocks == 0


@pytest.mark.parametrize("fails", [True, False])
def test_tokens_given_to_forward_after_generate_are_found_if_their_keys_are_there(model, fails):
    """The sixth forward, of the 46th token, fails in its last layer; the user goes on with the cache all the same."""
    inputs = prompts([50])
    tail = torch.arange(60, 75)[None]
    first = generate(model, inputs, max_new_tokens=6)
    given = torch.cat([first[:, :-1], tail], 1)
    asked = {"input_ids": torch.cat([given, tail], 1)}
    expected = generate(model, asked)
    patch(model)
    cache = patch_of(model).new_cache(model)
    with interrupted(model.model.layers[-1], calls=6) if fails else nullcontext():
        generate(model, inputs, max_new_tokens=6, **with_cache(model, cache))
    with torch.no_grad():
        for token in tail[0]:
            model(token.view(1, 1), **with_cache(model, cache))
    with pytest.raises(ValueError, match="a forward failed") if fails else nullcontext():
        copy.deepcopy(cache).reset()
    cache.reset()
    computed = Computed(model)
    assert torch.equal(generate(model, asked), expected)
    found = asked["input_ids"].shape[1] - computed.take()[0]
    assert found == (44 if fails else given.shape[1] // 4 * 4)


def test_embeddings_and_no_reuse_by_default(model):
    inputs = prompts([50])
    pagedkv.patch(model, num_blocks=256, block_size=4)
    computed = Computed(model)
    generate(model, inputs)
    generate(model, inputs)
    assert [computed.calls[0], computed.calls[3]] == [41, 41]
    pagedkv.unpatch(model)
    embeddings = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach(),
        "attention_mask": inputs["attention_mask"],
    }
    expected = generate(model, embeddings)
    patch(model)
    assert torch.equal(generate(model, embeddings), expected)
    assert torch.equal(generate(model, embeddings), expected)


@pytest.mark.parametrize("by", ["argument", "config"])
def test_hidden_states_of_every_column_are_computed(model, by):
    """A call that asks for them hits nothing; what it computes can be hit by others."""
    inputs, options = prompts([50, 51, 52], [60]), {"return_dict_in_generate": True, "output_hidden_states": True}
    if by == "config":
        model.config.output_hidden_states = True
    expected = generate(model, inputs, **options)
    patch(model)
    for _ in range(2):
        got = generate(model, inputs, **options)
        assert torch.equal(got.sequences, expected.sequences)
        for ours, native in zip(got.hidden_states, expected.hidden_states, strict=True):
            for a, b in zip(ours, native, strict=True):
                assert a.shape == b.shape
                torch.testing.assert_close(a[:, -1:], b[:, -1:], atol=1e-4, rtol=0)
    model.config.output_hidden_states = False
    computed = Computed(model)
    generate(model, prompts([50, 51, 52, 53]))
    assert computed.take()[0] == (4 if by == "argument" else 44)  # the config is identity


def test_off_for_recurrent_layers_and_batch_dependent_rope(caplog):
    hybrid = tiny(
        "qwen3_next",
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        num_experts=2,
        linear_value_head_dim=16,
        num_experts_per_tok=1,
        layer_types=["linear_attention", "full_attention"] * 2,
        num_hidden_layers=4,
    )
    rope = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    for model, words in ((hybrid, "recurrent"), (rope, "rotary")):
        inputs = ragged([9, 9])
        expected = generate(model, inputs)
        patch(model)
        assert words in caplog.text
        computed = Computed(model)
        assert torch.equal(generate(model, inputs), expected)
        generate(model, inputs)
        assert computed.calls[0] == computed.calls[3] == 18
