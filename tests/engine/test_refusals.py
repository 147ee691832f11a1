"""What is refused by name before anything changes: models, arguments of an engine, settings and prompts."""

import copy
import dataclasses
import inspect
import math
import re

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BatchEncoding,
    GenerationConfig,
    LlamaForCausalLM,
    WatermarkingConfig,
)

import pagedkv
from pagedkv.engine import Engine, EngineConfig
from pagedkv.engine.results import StepOutput
from pagedkv.engine.settings import Settings
from pagedkv.errors import InvalidArgumentError
from pagedkv.hf import UnsupportedModelError

from .conftest import build_llama
from .oracle import native

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _model(kind, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | changes)).eval()


def _dynamic_rope():
    return build_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})


class PositionsFromTheMask(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, **kwargs):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=positions, cache=cache, **kwargs)


class NoPositions(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, cache=None, use_cache=None):
        return super().forward(input_ids, attention_mask=attention_mask, cache=cache, use_cache=use_cache)


class NoFurtherArguments(LlamaForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, cache=None, use_cache=None):
        return super().forward(input_ids, attention_mask, position_ids, cache, use_cache=use_cache)


def _encoder_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: _model("qwen3_next", num_hidden_layers=4, num_experts=4, num_experts_per_tok=1, head_dim=8,
                        moe_intermediate_size=16, shared_expert_intermediate_size=16), "recurrent or convolutional"),
        (lambda: _model("lfm2", num_hidden_layers=3, full_attn_idxs=[1]), "recurrent or convolutional"),
        (_dynamic_rope, "rotary embedding depends on the longest row"),
        (lambda: PositionsFromTheMask(build_llama().config).eval(), "differ from its own"),
        (lambda: NoPositions(build_llama().config).eval(), "no argument position_ids"),
        (lambda: NoFurtherArguments(build_llama().config).eval(), "no arguments for its attention"),
        (lambda: _model("stablelm"), "its attention is not given arguments of its forward"),
        (lambda: _model("bloom", n_head=4, n_layer=1), "position_ids"),
        (lambda: _model("mamba"), "can not be served"),
        (_encoder_decoder, "encoder-decoder"),
    ],
    ids=["hybrid", "convolutional", "dynamic rope", "positions ignored", "no positions", "no kwargs", "kwargs dropped",
         "bloom", "mamba", "t5"],
)  # fmt: skip
def test_refused_by_name(build, reason):
    model = build()
    implementation = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as error:
        pagedkv.Engine(model, num_blocks=16)
    assert type(model).__name__ in str(error.value)
    assert reason in str(error.value)
    assert model.config._attn_implementation == implementation


class _Own:
    """No plain type, so that no check can hold for it by chance."""


_WRONG = {
    **dict.fromkeys(("max_time", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"), "x"),
    **dict.fromkeys(("top_k", "repetition_penalty", "encoder_repetition_penalty"), "x"),
    "temperature": ["x", True, 10**400, math.nan],
    **dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), ("no", 2)),
    "no_repeat_ngram_size": ["x", -1, 1.5],
    "encoder_no_repeat_ngram_size": ["x", -1],
    "max_new_tokens": ["x", 0, True, 9.5],
    "prompt_lookup_num_tokens": ["x", -1, 2**70, 1.5],
    "num_return_sequences": ["2", 0, 9],  # the last: more than max_num_seqs
    "generation_config": [5],
    "priority": [math.nan, "high"],
    "min_new_tokens": ["x", -1],
    "num_beams": ["x", 0, 1.5],
    "eos_token_id": [1.5, "x", [1, "x"], True, torch.tensor([1.5]), {3}, 2**70],
    "bos_token_id": [1.5],
    "pad_token_id": ["x", [1]],
    "forced_bos_token_id": [101, -1, [1]],
    "forced_eos_token_id": [1.5, 101, [1, 101], np.int64(101)],
    "suppress_tokens": [5, ["x"]],
    "begin_suppress_tokens": [5, ["x"]],
    "exponential_decay_length_penalty": ["x", (1,), (1, "x"), (1, 1.1)],  # the last: without an eos token
    "guidance_scale": ["x", 1.5],
    "token_healing": ["x", True],
    "use_cache": [False, "no", torch.tensor([True, False]), np.array([True, False])],
    "cache_implementation": ["static", "x"],
    "cache_config": [{"block_size": 4}],
    "max_cache_len": [64],
    "prefill_chunk_size": [3],
    "continuous_batching_config": ["x"],
    "output_scores": [True],
    "output_logits": [True],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "logits_processor": [5, [5]],
    "stopping_criteria": [5, [5]],
    "seed": ["x", -1, True, 2**63],
    "logprobs": ["x", -1, 1.5, 102],
    "cache_salt": [_Own()],
    "sequence_bias": [{(1,): math.nan}, [[[1], math.nan]]],
}


# refused by transformers' own classes, which are made and tried when a request is added: what their errors name
_THEIRS = [
    ({"temperature": 0}, "`temperature`"),
    ({"top_k": 2.5}, "`top_k`"),
    ({"top_p": -0.1}, "`top_p`"),
    ({"min_p": 1.5}, "`min_p`"),
    ({"repetition_penalty": -1.0}, "`penalty`"),
    ({"bad_words_ids": [[np.int64(101)]]}, "vocabulary size is 101"),
    ({"sequence_bias": {(101,): 1.0}}, "vocabulary size is 101"),
    ({"sequence_bias": {(1,): "x"}}, "`sequence_bias`"),
    ({"watermarking_config": {"unknown": 1}}, "unknown"),
    ({"watermarking_config": {"bias": "x"}}, "WatermarkLogitsProcessor: "),
    ({"watermarking_config": WatermarkingConfig(context_width="x")}, "str"),
    ({"early_stopping": "x"}, "`early_stopping`"),
    ({"stop_strings": 5}, "stop"),
]


@pytest.fixture(scope="module")
def served(llama):
    engine = pagedkv.Engine(llama, num_blocks=64, block_size=4, max_num_seqs=8)
    yield engine
    assert engine.generate([[1, 2, 3]], max_new_tokens=2)[0].finish_reason == "length"
    engine.check_integrity()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in _WRONG.items() for value in values])
def test_a_setting_of_a_wrong_type_or_out_of_its_range_is_named(served, name, value):
    options = {"max_new_tokens": 4, "do_sample": True} | {name: value}
    with pytest.raises(InvalidArgumentError) as error:
        served.add_request([1, 2, 3], **options)
    assert re.match(rf"{name}: expected .+, got ", str(error.value))
    assert served.stats().num_waiting == served.stats().num_prompt_tokens == 0


@pytest.mark.parametrize(("options", "named"), _THEIRS, ids=str)
def test_what_transformers_refuses_is_refused_when_a_request_is_added(served, options, named):
    with pytest.raises(InvalidArgumentError) as error:
        served.add_request([1, 2, 3], **{"max_new_tokens": 4, "do_sample": True} | options)
    assert re.match(f"{next(iter(options))}: expected .+, got ", str(error.value), re.S)
    assert named in str(error.value)
    assert served.stats().num_waiting == served.stats().num_prompt_tokens == 0


def test_a_fault_of_our_own_is_not_the_callers(served, monkeypatch):
    monkeypatch.setattr(Settings, "_key", lambda self: {}[0])
    with pytest.raises(KeyError):
        served.add_request([1, 2, 3])


def test_an_id_that_no_request_can_have_is_refused(served):
    with pytest.raises(InvalidArgumentError, match=r"^request_id: expected an int, got \[1\]"):
        served.abort([1])
    assert served.abort(np.int64(10**6)) is False


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2).eval(), "llama", None])
def test_what_is_no_transformers_model(model):
    with pytest.raises(InvalidArgumentError, match=r"^model: expected a transformers model, got "):
        pagedkv.Engine(model)


@pytest.mark.parametrize(
    ("prompts", "options", "text"),
    [
        (torch.tensor(5), {}, r"prompts: expected a list of prompts, got a tensor of shape \(\)"),
        ([[1]], {"progress": "yes"}, "progress: expected a bool, got 'yes'"),
        ([[1], [2]], {"seed": "a"}, "seed: expected"),
        ([[1], [2]], {"seed": 2**70}, "seed: expected"),
        ([1, 2, 3], {}, r"prompts: expected a list of prompts, got token ids; pass \[ids\]"),
        (torch.tensor([1, 2, 3]), {}, r".*got a tensor of shape \(3,\); pass \[ids\]"),
        ("text", {}, "prompts: expected a list of prompts, got a string"),
        (BatchEncoding({"input_ids": [[1, 2]]}), {}, ".*got BatchEncoding; pass its input_ids"),
        (5, {}, "prompts: expected a list of prompts, got int"),
        ([torch.tensor([[1, 2]])], {}, r".*prompt: expected token ids \[T\], got a tensor of shape \(1, 2\)"),
        ([{"input_ids": [1]}], {}, ".*expected text or token ids, got dict; pass the rows of its input_ids"),
    ],
)
def test_an_argument_of_generate_is_refused(served, prompts, options, text):
    with pytest.raises(InvalidArgumentError, match=f"^{text}"):
        served.generate(prompts, **options)


def test_a_config_object_is_checked_like_options(served):
    with pytest.raises(InvalidArgumentError, match="top_p: expected a number, got 'x'"):
        served.add_request([1, 2, 3], GenerationConfig(do_sample=True, top_p="x"))
    with pytest.raises(InvalidArgumentError, match=r"use_cache: expected None or True \(.*\), got False"):
        served.add_request([1, 2, 3], GenerationConfig(use_cache=False))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "top_k": -1, "top_p": 7.0},
        {"eos_token_id": -1},
        {"eos_token_id": []},
        {"eos_token_id": torch.tensor([100])},
        {"suppress_tokens": torch.tensor([100])},
        {"use_cache": True, "cache_implementation": "dynamic", "output_scores": False, "max_time": math.inf},
        {"logits_processor": None, "stopping_criteria": None},
    ],
)
def test_what_greedy_generation_does_not_read_is_not_refused(llama, make_engine, options):
    result = make_engine(llama).generate([[1, 2, 3]], max_new_tokens=4, do_sample=False, **options)[0]
    assert result.token_ids == native(llama, [1, 2, 3], max_new_tokens=4, do_sample=False)


def test_numbers_of_any_type_are_taken(llama, make_engine):
    engine = make_engine(llama)
    floats, others = (
        engine.generate([[1, 2, 3]], max_new_tokens=6, do_sample=True, seed=1, temperature=two, top_k=k, max_time=99)[0]
        for two, k in ((2.0, 20), (2, np.int64(20)))
    )
    assert floats.token_ids == others.token_ids


def test_ngrams_longer_than_any_prompt_cost_nothing(llama, make_engine):
    options = {"max_new_tokens": 4, "prompt_lookup_num_tokens": 2, "do_sample": False}
    longest = dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "max_matching_ngram_size"), 2**62)
    result = make_engine(llama).generate([[1, 2, 3]], **options, **longest)[0]
    assert result.token_ids == native(llama, [1, 2, 3], max_new_tokens=4, do_sample=False)


def test_what_the_models_own_file_says_about_its_cache_is_nobodys_wish(make_engine):
    model = build_llama()
    model.generation_config.cache_implementation = "static"
    engine = make_engine(model)
    assert engine.generate([[1, 2, 3]], max_new_tokens=2)[0].error is None
    assert engine.generate([[1, 2, 3]], copy.deepcopy(model.generation_config), max_new_tokens=2)[0].error is None
    with pytest.raises(InvalidArgumentError, match="cache_implementation"):
        engine.generate([[1, 2, 3]], max_new_tokens=2, cache_implementation="sliding_window")


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graphs": "yes"},
        {"cuda_graphs": 1},
        {"cuda_graphs": True},
        {"prefix_caching": "no"},
        {"prefix_caching": None},
        {"compile": "yes"},
        {"compile": {"mode": "max-autotune"}},
        {"progress": "no"},
        {"tokenizer": "smollm"},
        {"kv_dtype": "x"},
        {"kv_dtype": "float32"},
        {"kv_dtype": torch.uint8},
        {"kv_dtype": torch.float64},
        {"memory": "x"},
        {"memory": True},
        {"memory": 1.5},
        {"memory": 0},
        {"memory": 2**20, "num_blocks": 16},
        {"max_num_seqs": True},
        {"max_num_seqs": 0},
        {"max_num_seqs": "a"},
        {"max_num_batched_tokens": 7, "max_num_seqs": 8},
        {"max_num_batched_tokens": None},
        {"buckets": [1, 4]},
        {"buckets": 5},
        {"buckets": ["a"]},
        {"buckets": "x"},
        {"num_blocks": 1},
        {"block_size": 0},
        {"num_host_blocks": -1},
        {"watermark": "x"},
        {"watermark": 1.0},
        {"watermark": math.nan},
        {"watermark": True},
        {"max_num_batched_tokens": 2**40},
        {"max_num_seqs": 2**40, "max_num_batched_tokens": 2**40},
    ],
)
def test_an_argument_of_the_engine_is_refused_before_the_model_is_used(options):
    model = build_llama()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was used"))
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*: expected .*, got "):
        pagedkv.Engine(model, **options)


@pytest.mark.parametrize(
    ("name", "value"), [("num_host_blocks", 2**31), ("num_host_blocks", 2**70), ("num_blocks", 2**40)]
)
def test_more_blocks_than_memory_are_refused(llama, name, value):
    with pytest.raises(InvalidArgumentError, match=rf"^{name}={value}: expected .* bytes.*, got "):
        pagedkv.Engine(llama, **{"num_blocks": 16, name: value})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_beams": 3}, "generation_config: expected greedy, sampling or prompt lookup, got beam_search"),
        ({"stop_strings": ["x"]}, "stop_strings: expected an Engine with a tokenizer"),
        ({"no_such_option": 1}, "no_such_option: not an option"),
        ({"n": 3}, "n: not an option .* num_return_sequences"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1.5}, "max_matching_ngram_size: expected"),
        ({"do_sample": True, "num_return_sequences": 2, "seed": 2**63 - 1}, "seed: expected .* 2 samples"),
        ({"max_new_tokens": 250}, "prompt: expected at most 252 tokens .* 63 blocks of 4\\), got 3 tokens, up to 253 "),
    ],
)
def test_what_no_single_value_shows(served, options, text):
    with pytest.raises(InvalidArgumentError, match=f"^{text}"):
        served.add_request([1, 2, 3], **options)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([500], r"^prompts\[2\]: prompt: expected text, or at least one token id in 0\.\.100, got \[500\]"),
        ([], r"^prompts\[2\]: prompt: expected"),
        ("text", r"^prompts\[2\]: prompt: expected token ids"),
        (None, r"^prompts\[2\]: prompt: expected text or token ids, got NoneType"),
        ([1] * 600, r"^prompts\[2\]: prompt: expected at most \d+ tokens .*, got 600 tokens, up to 603 "),
        ([3, -1], r"^prompts\[2\]: prompt: expected .* 0\.\.100, got \[3, -1\]"),
        ([1.5], r"^prompts\[2\]: prompt: expected .*, got \[1\.5\]"),
        (np.array([1.5]), r"^prompts\[2\]: prompt: expected .*1\.5"),
        (b"abc", r"^prompts\[2\]: prompt: expected text or token ids, got bytes"),
        ([True], r"^prompts\[2\]: prompt: expected .*, got \[True\]"),
        (torch.tensor([True]), r"^prompts\[2\]: prompt: expected .*, got \[True\]"),
        ({3, 4}, r"^prompts\[2\]: prompt: expected text or token ids, got set"),
    ],
)
def test_a_bad_prompt_in_a_list_is_named_by_its_index_and_leaves_no_trace(llama, make_engine, bad, text):
    engine = make_engine(llama)
    with pytest.raises(InvalidArgumentError, match=text):
        engine.generate([[1, 2], [3], bad, [4]], max_new_tokens=3, do_sample=True, num_return_sequences=2)
    stats = engine.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_prompt_tokens) == (0, 0, 0)
    assert engine.step() == StepOutput()
    engine.check_integrity()


def test_a_bad_config_in_a_list_is_named_by_its_index_and_one_for_all_is_not(llama, make_engine):
    engine = make_engine(llama)
    bad = GenerationConfig(do_sample=True, top_p="x")
    with pytest.raises(InvalidArgumentError, match=r"^prompts\[1\]: top_p: expected"):
        engine.generate([[1], [2]], [GenerationConfig(max_new_tokens=2), bad])
    with pytest.raises(InvalidArgumentError, match=r"^top_p: expected"):
        engine.generate([[1], [2]], bad)
    assert engine.stats().num_waiting == 0


def test_an_engine_takes_the_settings_of_its_config():
    parameters = inspect.signature(Engine).parameters.values()
    named = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert named == {each.name: each.default for each in dataclasses.fields(EngineConfig)}
