"""generate() of a patched model against the same call of the unpatched one."""

from __future__ import annotations

import copy

import pytest
import torch
from models import EXTRA, ragged, tiny, with_cache

import pagedkv
from pagedkv import layer_modes


def both(model, inputs, seed=0, **kwargs):
    """(native output, paged output) of one generate call; the pool's blocks are back afterwards."""
    torch.manual_seed(seed)
    native = model.generate(**inputs, **kwargs)
    with pagedkv.patched(model, block_size=4, num_blocks=256):
        torch.manual_seed(seed)
        paged = model.generate(**inputs, **kwargs)
        pool = pagedkv.pool(model)
        assert pool.peak_used_blocks > 0, "generate did not use the pool"
        assert set(layer_modes(model)) == {"paged"}
        if torch.is_tensor(paged):
            assert pool.used_blocks == 0
    return native, paged


@pytest.mark.parametrize("family", EXTRA)
@pytest.mark.parametrize("side", ["left", "right"])
def test_greedy(family, side):
    # past the window of 6 only on the left: natively a window counts padding behind a row as tokens
    lengths = [11, 3, 7, 1] if side == "left" or family in ("llama", "qwen3") else [5, 3]
    new_tokens = 20 if side == "left" or family in ("llama", "qwen3") else 1
    native, paged = both(tiny(family), ragged(lengths, side=side), max_new_tokens=new_tokens, do_sample=False)
    assert torch.equal(native, paged)


def test_softcap_and_sinks_reach_the_op():
    """What a dropped softcap or sink would change is seen, by paged layers, in every logit."""
    for family, dropped in (("gemma2", "attn_logit_softcapping"), ("gpt_oss", "sinks")):
        model, ids = tiny(family), torch.randint(2, 128, (2, 12), generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            expected = model(ids).logits
            without = copy.deepcopy(model)
            if dropped == "sinks":
                for name, parameter in without.named_parameters():
                    if "sinks" in name:
                        parameter.fill_(float("-inf"))
            else:
                for module in without.modules():
                    if hasattr(module, dropped):
                        setattr(module, dropped, None)
            assert (without(ids).logits - expected).abs().amax() > 1e-2
            pagedkv.patch(model, block_size=4, num_blocks=64)
            assert layer_modes(model) == ["paged"] * 3
            cache = pagedkv.PagedCache(model.config, pool=pagedkv.pool(model))
            logits = model(ids, **with_cache(model, cache)).logits
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert pagedkv.pool(model).used_blocks > 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True},
        {"do_sample": True, "num_beams": 2},
        {"prefill_chunk_size": 4},
        {"repetition_penalty": 1.3},
        {"logits_processor": [lambda ids, scores: scores.index_fill(1, ids[:, -1] % 7, -1e9)]},
        {"stopping_criteria": [lambda ids, scores, **_: (ids[:, -3:] % 3 == 0).any(1)]},
        {"cache_implementation": "dynamic"},
        {"use_cache": False},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(family, options):
    model, inputs = tiny(family), ragged([9, 4, 12])
    if options.get("use_cache") is False:
        native = model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=False)
        with pagedkv.patched(model, num_blocks=64):
            assert torch.equal(native, model.generate(**inputs, max_new_tokens=6, do_sample=False, use_cache=False))
            assert pagedkv.pool(model).peak_used_blocks == 0
        return
    native, paged = both(model, inputs, max_new_tokens=14, **{"do_sample": False, **options})
    assert torch.equal(native, paged)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_batched_chat_with_padding_inside_rows(family):
    """Natively a window counts such padding as tokens, so the oracle is each row alone."""
    model = tiny(family)
    ids = torch.randint(2, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 5:9] = 0  # a shorter answer before the second question
    mask[1, :2] = 0
    options = {"max_new_tokens": 12, "do_sample": False}
    alone = [model.generate(row[real.bool()][None], **options)[0, -12:] for row, real in zip(ids, mask, strict=True)]
    pagedkv.patch(model, block_size=4, num_blocks=64)
    out = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(out[:, 16:], torch.stack(alone))
