"""patch, unpatch and patched: what they leave behind, what they refuse, where their blocks go."""

from __future__ import annotations

import copy
import gc
import linecache
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers
from models import Computed, generate, ragged, tiny, with_cache
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    StoppingCriteria,
)

import pagedkv
from pagedkv.errors import OutOfBlocksError


@pytest.fixture
def model():
    return tiny("gemma3_text")


@pytest.fixture
def inputs():
    return ragged([9, 4, 12])


def test_unpatch_leaves_nothing(model, inputs):
    before, attributes, kind = generate(model, inputs), dict(model.__dict__), type(model)
    implementation = model.config._attn_implementation
    assert pagedkv.patch(model, num_blocks=64) is model
    assert pagedkv.patch(model, num_blocks=64) is model
    with pytest.raises(ValueError, match="unpatch it first"):
        pagedkv.patch(model, num_blocks=65)
    generate(model, inputs)
    assert model.config._attn_implementation == implementation
    assert pagedkv.unpatch(model) is model
    assert pagedkv.unpatch(model) is model
    assert type(model) is kind
    assert model.__dict__ == attributes
    assert torch.equal(generate(model, inputs), before)


def test_patched_restores_after_an_error(model):
    with pytest.raises(KeyError), pagedkv.patched(model, num_blocks=64):
        raise KeyError
    assert "generate" not in vars(model)
    assert type(model).__name__ == "Gemma3ForCausalLM"
    with pagedkv.patched(pagedkv.patch(model, num_blocks=64), num_blocks=64):
        pass
    assert pagedkv.pool(model).num_blocks == 64  # it was patched before, so it still is


def test_two_models_side_by_side(inputs):
    one, two = tiny("llama", seed=1), tiny("qwen3", seed=2)
    expected = generate(one, inputs), generate(two, inputs)
    pagedkv.patch(one, num_blocks=64, block_size=4)
    pagedkv.patch(two, num_blocks=32, block_size=16)
    assert torch.equal(generate(one, inputs), expected[0])
    assert torch.equal(generate(two, inputs), expected[1])
    assert pagedkv.pool(one).num_blocks == 64
    assert pagedkv.pool(two).block_size == 16


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "save_pretrained"])
def test_copies_are_unpatched(model, inputs, how, tmp_path):
    expected = generate(model, inputs)
    kind = type(model)
    pagedkv.patch(model, num_blocks=64)
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    elif how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        model.save_pretrained(tmp_path)
        assert "pagedkv" not in (tmp_path / "config.json").read_text()
        twin = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(twin) is kind
    assert twin.config._attn_implementation != "pagedkv"
    assert torch.equal(generate(twin, inputs), expected)


def test_exhaustion_names_the_numbers_and_gives_blocks_back(model, inputs):
    expected = generate(model, inputs)
    pagedkv.patch(model, num_blocks=14, block_size=4)
    with pytest.raises(OutOfBlocksError, match=r"row \d of 3 needs \d+ blocks .* \d+ of 13 blocks .* are free"):
        generate(model, inputs, max_new_tokens=60)
    assert pagedkv.pool(model).used_blocks == 0
    pagedkv.pool(model).manager.check_integrity()
    short = {name: tensor[:1, 3:] for name, tensor in inputs.items()}
    assert torch.equal(generate(model, short, max_new_tokens=3), expected[:1, 3 : 12 + 3])


def test_blocks_return_when_generate_is_interrupted(model, inputs):
    class Interrupt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] > 15:
                raise KeyboardInterrupt
            return torch.zeros(len(input_ids), dtype=torch.bool)

    pagedkv.patch(model, num_blocks=64)
    with pytest.raises(KeyboardInterrupt):
        generate(model, inputs, stopping_criteria=[Interrupt()])
    assert pagedkv.pool(model).used_blocks == 0
    assert model.config._attn_implementation != "pagedkv"


class _Lines:
    """Notes the lines of functions that run, and raises at the n-th."""

    def __init__(self, functions, raise_at=0):
        self.functions, self.raise_at, self.lines = functions, raise_at, []

    def __call__(self, frame, event, argument):
        code = frame.f_code
        return self.line if "pagedkv/hf/" in code.co_filename and code.co_name in self.functions else None

    def line(self, frame, event, argument):
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        # no interrupt can come at `try`, nor at `with` on the way out, before __exit__: neither calls anything
        if event == "line" and text != "try:" and not (text.startswith("with") and text in self.lines):
            self.lines.append(text)
            if len(self.lines) == self.raise_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.line


def test_an_interrupt_at_any_line_of_the_switch_leaves_the_model_as_it_was(inputs):
    model = tiny("llama")
    expected = generate(model, inputs, max_new_tokens=2)
    pagedkv.patch(model, num_blocks=64)
    patch = model.__dict__["_pagedkv_patch"]

    def run(raise_at=0):
        trace = _Lines({"run", "_switch", "_switch_back", "_generated"}, raise_at)
        sys.settrace(trace)
        try:
            return generate(model, inputs, max_new_tokens=2), trace.lines
        finally:
            sys.settrace(None)

    output, lines = run()
    assert torch.equal(output, expected)
    assert {"self._turn.is_switched = False", "patch.created = created", "return function(*args, **kwargs)"} <= {*lines}
    for number in range(1, len(lines) + 1):
        with pytest.raises(KeyboardInterrupt):
            run(number)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(patch._turn.lock.acquire, blocking=False).result(), lines[number - 1]
            other.submit(patch._turn.lock.release)
        assert model.config._attn_implementation != "pagedkv", lines[number - 1]
        assert (patch._turn.is_switched, patch.created) == (False, None), lines[number - 1]
        assert pagedkv.pool(model).used_blocks == 0
    assert torch.equal(generate(model, inputs, max_new_tokens=2), expected)


@pytest.mark.parametrize("block_size", [7, 16, 48])
def test_memory_decides_the_number_of_blocks(model, inputs, block_size):
    pagedkv.patch(model, memory=2**20, block_size=block_size)
    pool = pagedkv.pool(model)
    generate(model, inputs)
    assert (pool.block_size, pool.num_blocks) == (block_size, 2**20 // pool.block_bytes)


def test_memory_is_touched_only_as_blocks_are_used():
    psutil = pytest.importorskip("psutil")
    model, inputs = tiny("llama", num_key_value_heads=4, head_dim=64), ragged([40, 40])
    pagedkv.patch(model, num_blocks=65_536)  # 3 GiB
    process = psutil.Process()
    before = process.memory_info().rss
    generate(model, inputs)
    pool = pagedkv.pool(model)
    assert pool.num_blocks * pool.block_bytes > 3 * 2**30
    assert process.memory_info().rss - before < 2**28


def test_returned_cache_keeps_its_blocks_and_goes_on(model, inputs):
    def chat(model):
        first = generate(model, inputs, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.full((3, 5), 7)], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 15, dtype=torch.long)], 1)
        kept = first.get("cache", first.get("past_key_values"))
        return generate(model, {"input_ids": ids, "attention_mask": mask}, **with_cache(model, kept)), kept

    expected, _ = chat(model)
    pagedkv.patch(model, num_blocks=64, block_size=4)
    out, cache = chat(model)
    assert torch.equal(out, expected)
    pool = pagedkv.pool(model)
    assert pool.used_blocks > 0
    del cache
    gc.collect()
    assert pool.used_blocks == 0


def test_expanded_rows_share_their_prompt(model):
    inputs = ragged([64])
    model = tiny("llama")
    pagedkv.patch(model, num_blocks=256, block_size=4)
    generate(model, inputs, num_return_sequences=4, do_sample=True, max_new_tokens=4)
    # 16 blocks of prompt once, and one block of new tokens for each row, instead of 4 * 17
    assert pagedkv.pool(model).peak_used_blocks == 16 + 4


def test_prefill_computes_real_tokens_of_distinct_rows_only():
    model, inputs = tiny("llama"), ragged([9, 4, 12])
    computed = Computed(model)
    pagedkv.patch(model, num_blocks=256, block_size=4)
    computed.take()
    generate(model, inputs, num_return_sequences=2, do_sample=True, max_new_tokens=3)
    assert computed.take() == [9 + 4 + 12, 6, 6]


def test_other_paths_stay_native(model, inputs):
    expected = generate(model, inputs, cache_implementation="static"), model(**inputs).logits
    pagedkv.patch(model, num_blocks=64)
    assert torch.equal(generate(model, inputs, cache_implementation="static"), expected[0])
    own_cache = with_cache(model, DynamicCache(config=model.config))
    assert torch.equal(generate(model, inputs, **own_cache), expected[0])
    assert torch.equal(model(**inputs).logits, expected[1])
    assert pagedkv.pool(model).peak_used_blocks == 0


def test_assisted_decoding_and_embeddings(inputs):
    for family in ("llama", "gemma3_text"):
        model, assistant = tiny(family), tiny(family, seed=3, num_hidden_layers=3)
        single = {name: tensor[2:] for name, tensor in inputs.items()}
        embeddings = {
            "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach(),
            "attention_mask": inputs["attention_mask"],
        }
        calls = [
            (single, {"prompt_lookup_num_tokens": 3, "max_new_tokens": 25}),
            (single, {"assistant_model": assistant, "max_new_tokens": 25}),
            (embeddings, {}),
        ]
        expected = [generate(model, *call[:1], **call[1]) for call in calls]
        pagedkv.patch(model, num_blocks=96, block_size=4)
        pagedkv.patch(assistant, num_blocks=96, block_size=4)
        for call, native in zip(calls, expected, strict=True):
            assert torch.equal(generate(model, *call[:1], **call[1]), native)
        assert pagedkv.pool(model).used_blocks == 0
        assert pagedkv.pool(assistant).peak_used_blocks > 0


def test_parameter_types_may_change_after_patch(inputs):
    model = tiny("llama")
    pagedkv.patch(model, num_blocks=64)
    model.to(torch.float64)
    with pagedkv.patched(model, num_blocks=64):
        pass
    model.to(torch.bfloat16)
    out = generate(model, inputs)
    pagedkv.unpatch(model)
    assert (out == generate(model, inputs)).float().mean() > 0.8


def test_streamer_sees_the_same_tokens(model, inputs):
    class Streamer(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.reshape(-1).tolist()

        def end(self): ...

    single = {name: tensor[2:] for name, tensor in inputs.items()}
    native, paged = Streamer(), Streamer()
    generate(model, single, streamer=native)
    pagedkv.patch(model, num_blocks=64)
    generate(model, single, streamer=paged)
    assert paged.tokens == native.tokens
    assert pagedkv.pool(model).peak_used_blocks > 0


def test_dispatched_by_accelerate(model, inputs):
    accelerate = pytest.importorskip("accelerate")
    expected = generate(model, inputs)
    model = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    pagedkv.patch(model, num_blocks=64)
    assert torch.equal(generate(model, inputs), expected)
    assert pagedkv.pool(model).peak_used_blocks > 0


def test_continuous_batching_of_the_library_still_works():
    model = tiny("llama")
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1)
    # left alone, the library's own cache takes most of the machine's memory, and touches it
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)

    def batch(model):
        results = model.generate_batch(prompts, generation_config=config, continuous_batching_config=small)
        return sorted((tuple(r.prompt_ids), tuple(r.generated_tokens)) for r in results.values())

    expected = batch(model)
    pagedkv.patch(model, num_blocks=64)
    assert batch(model) == expected


def test_threads_take_turns():
    model = tiny("llama")
    inputs = [ragged([5 + i]) for i in range(4)]
    expected = [generate(model, one, max_new_tokens=20) for one in inputs]
    pagedkv.patch(model, num_blocks=64)
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda one: generate(model, one, max_new_tokens=20), inputs))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert pagedkv.pool(model).used_blocks == 0


def test_engines_and_a_patch_on_one_model_take_turns():
    model = tiny("llama")
    inputs = [ragged([5 + i]) for i in range(3)]
    expected = [generate(model, one, max_new_tokens=16) for one in inputs]
    engines = [pagedkv.Engine(model, num_blocks=64, block_size=4) for _ in range(2)]
    pagedkv.patch(model, num_blocks=64)

    def serve(engine):
        for one, tokens in zip(2 * inputs, 2 * expected, strict=True):
            prompt = one["input_ids"][0].tolist()
            result = engine.generate([prompt], max_new_tokens=16, do_sample=False, eos_token_id=None)[0]
            assert prompt + result.token_ids == tokens[0].tolist()

    def run():
        for one, tokens in zip(2 * inputs, 2 * expected, strict=True):
            assert torch.equal(generate(model, one, max_new_tokens=16), tokens)

    with ThreadPoolExecutor(3) as threads:
        for future in [threads.submit(run), *(threads.submit(serve, engine) for engine in engines)]:
            future.result()


def test_a_model_already_set_to_pagedkv_can_be_patched(inputs):
    model = tiny("llama")
    expected = generate(model, inputs)
    model.set_attn_implementation("pagedkv")
    pagedkv.patch(model, num_blocks=64)
    assert torch.equal(generate(model, inputs), expected)
    assert pagedkv.pool(model).peak_used_blocks > 0
    pagedkv.unpatch(model)
    assert model.config._attn_implementation == "pagedkv"
    assert torch.equal(generate(model, inputs), expected)


def test_options_that_compilation_refuses_leave_the_model_as_it_was(model):
    attributes, kind = dict(vars(model)), type(model)
    with pytest.raises(RuntimeError, match="nonsense"):
        pagedkv.patch(model, num_blocks=64, compile={"mode": "nonsense"})
    assert vars(model) == attributes
    assert type(model) is kind


def test_sizes_may_be_ints_of_numpy(model):
    pagedkv.patch(model, num_blocks=np.int64(64), block_size=np.int32(8))
    assert repr(pagedkv.pool(model)).startswith("Pool(0 of 63 blocks of 8 tokens used")
    pagedkv.patch(model, num_blocks=64, block_size=8)


def test_empty_input_ids_are_refused_by_name(model, inputs):
    expected = generate(model, inputs)
    pagedkv.patch(model, num_blocks=64)
    with pytest.raises(ValueError, match="input_ids: expected at least one token"):
        generate(model, {"input_ids": torch.zeros(1, 0, dtype=torch.long)})
    assert torch.equal(generate(model, inputs), expected)
