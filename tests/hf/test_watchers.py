"""What user code inside the model sees stays as it was: rows keep their dimension where somebody may look at them."""

from __future__ import annotations

import functools

import pytest
import torch
from models import Computed, ragged, tiny

import pagedkv
from tests.adapters import peft, with_adapters

BATCH = [9, 4, 12]
MODES = {
    "ragged": {},
    "samples": {"num_return_sequences": 3},
    "beams": {"num_beams": 2},
}


def patch(model, **options):
    return pagedkv.patch(model, num_blocks=512, block_size=4, **options)


def generate(model, inputs, **kwargs):
    torch.manual_seed(0)
    kwargs = {"max_new_tokens": 4, "do_sample": "num_return_sequences" in kwargs, **kwargs}
    return model.generate(**inputs, **kwargs)


def rows_of(mode):
    """The inputs, and how many rows the model sees."""
    inputs = ragged([9] if mode == "samples" else BATCH)
    return inputs, len(inputs["input_ids"]) * (
        MODES[mode].get("num_return_sequences") or MODES[mode].get("num_beams", 1)
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_probe_sees_every_row(mode):
    inputs, count = rows_of(mode)
    model = tiny("llama")
    seen = []
    model.model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out[:, -1].clone()))
    expected = generate(model, inputs, **MODES[mode])
    native, seen[:] = list(seen), []
    patch(model)
    seen.clear()
    assert torch.equal(generate(model, inputs, **MODES[mode]), expected)
    assert [tuple(states.shape) for states in seen] == [(count, 64)] * 4
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(seen, native, strict=True))


KINDS = ["pre-hook", "pre-hook with kwargs", "global hook", "forward", "module", "class"]


@pytest.mark.parametrize(("mode", "kind"), [*((mode, "hook") for mode in MODES), *(("ragged", kind) for kind in KINDS)])
def test_each_row_has_its_vector(mode, kind):
    """Steering: an offset per row, masked to the row's real tokens where the mask has the columns."""
    inputs, count = rows_of(mode)
    model = tiny("llama")
    vectors = torch.randn(count, 1, 64, generator=torch.Generator().manual_seed(3)) * 4

    def steer(hidden):
        mask = torch.ones(hidden.shape[:2])
        if hidden.shape[1] > 1:
            mask = inputs["attention_mask"].repeat_interleave(count // len(inputs["attention_mask"]), 0)
        return hidden + vectors * mask[:, :, None]

    def install():
        layer = model.model.layers[0]
        if kind == "hook":
            layer.register_forward_hook(lambda module, args, out: steer(out))
        elif kind == "pre-hook":
            layer.mlp.register_forward_pre_hook(lambda module, args: (steer(args[0]),))
        elif kind == "pre-hook with kwargs":
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, kw: (args, {**kw, "hidden_states": steer(kw["hidden_states"])}), with_kwargs=True
            )
        elif kind == "global hook":
            steer_one = lambda module, args, out: steer(out) if module is layer else None  # noqa: E731
            return torch.nn.modules.module.register_module_forward_hook(steer_one)
        elif kind == "forward":
            forward = layer.mlp.forward
            layer.mlp.forward = lambda hidden: steer(forward(hidden))
        elif kind == "module":
            layer.mlp = Steered(layer.mlp, steer)
        else:
            own = type(layer.mlp)
            layer.mlp.__class__ = type(
                "Own", (own,), {"forward": lambda self, hidden: steer(own.forward(self, hidden))}
            )
        return None

    plain = generate(model, inputs, **MODES[mode])
    patch(model)  # before the hook: the short run that patch makes has other rows
    handle = install()
    try:
        got = generate(model, inputs, **MODES[mode])
        expected = generate(pagedkv.unpatch(model), inputs, **MODES[mode])
    finally:
        if handle is not None:
            handle.remove()
    assert not torch.equal(expected[:, -4:], plain[:, -4:])
    assert torch.equal(got, expected)


class Steered(torch.nn.Module):
    def __init__(self, inner, steer):
        super().__init__()
        self.inner, self.steer = inner, steer

    def forward(self, hidden):
        return self.steer(self.inner(hidden))


class Own(RuntimeError): ...


class Raises:
    def __call__(self, module, args, *rest):
        if args[0].shape[0] != 3:
            raise Own("expected 3 rows")

    def method(self, module, args):
        self(module, args)


HOOKS = {
    "Raises": lambda layer: layer.register_forward_hook(Raises()),
    "Raises.method": lambda layer: layer.register_forward_pre_hook(Raises().method),
    "Raises.__call__": lambda layer: layer.register_forward_hook(functools.partial(Raises.__call__, Raises())),
    "global": lambda layer: torch.nn.modules.module.register_module_forward_hook(Raises()),
}


@pytest.mark.parametrize("serve", [pagedkv.patch, pagedkv.Engine])
@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_raises_is_named(kind, serve):
    model = tiny("llama")
    handle = HOOKS[kind](model.model.layers[1].input_layernorm)
    try:
        with pytest.raises(pagedkv.UnsupportedModelError, match=r"the hook Raises.* raised Own: expected 3 rows in"):
            serve(model, num_blocks=16)
    finally:
        handle.remove()
    serve(model, num_blocks=16)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
def test_mixed_adapters(beams, caching):
    model = with_adapters(tiny("llama"))
    inputs = ragged([9, 5])
    options = {"adapter_names": ["one", "two"], "num_beams": beams}
    expected = generate(model, inputs, **options)
    assert not torch.equal(expected, generate(model, inputs, num_beams=beams))
    patch(model, prefix_caching=caching)
    for _ in range(2):
        assert torch.equal(generate(model, inputs, **options), expected)
    swapped = {"adapter_names": ["two", "one"], "num_beams": beams}
    got = generate(model, inputs, **swapped)
    assert torch.equal(got, generate(pagedkv.unpatch(model), inputs, **swapped))


def test_recorded_states_keep_their_rows():
    """By the config, so that no argument of the call tells."""
    model, inputs = tiny("llama"), ragged(BATCH)
    model.config.output_hidden_states = True
    options = {"return_dict_in_generate": True, "output_hidden_states": True}
    expected = generate(model, inputs, **options)
    patch(model)
    got = generate(model, inputs, **options)
    for ours, native in zip(got.hidden_states[0], expected.hidden_states[0], strict=True):
        assert ours.shape == native.shape == (3, 12, 64)
        assert torch.allclose(ours[:, -1], native[:, -1], atol=1e-4)


def test_rows_are_packed_again_without_watchers():
    """Hooks that were removed, and those of the library that recorded states once, cost nothing."""
    model, inputs = tiny("llama"), ragged(BATCH)
    patch(model)
    generate(model, inputs, output_hidden_states=True, return_dict_in_generate=True)
    model.model.layers[0].register_forward_hook(lambda *_: None).remove()
    computed = Computed(model)
    generate(model, inputs)
    assert computed.take() == [sum(BATCH), 3, 3, 3]


SOFT = {
    "prompt tuning": peft.PromptTuningConfig,
    "prefix tuning": peft.PrefixTuningConfig,
    "p-tuning": peft.PromptEncoderConfig,
}


@pytest.mark.parametrize("kind", SOFT)
def test_soft_prompts_are_refused_by_name(kind):
    model = tiny("llama")
    config = SOFT[kind](task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(model, config).eval()
    inputs = ragged([5, 8])
    expected = wrapped.generate(**inputs, max_new_tokens=4, do_sample=False)
    with pytest.raises(pagedkv.hf.UnsupportedModelError, match=config.peft_type.value):
        patch(wrapped)
    assert torch.equal(wrapped.generate(**inputs, max_new_tokens=4, do_sample=False), expected)
    patch(model)  # the model inside can be patched, but not be used through the wrapper
    with pytest.raises(pagedkv.hf.UnsupportedModelError, match=config.peft_type.value):
        wrapped.generate(**inputs, max_new_tokens=4)
    pagedkv.unpatch(model)
    assert torch.equal(wrapped.generate(**inputs, max_new_tokens=4, do_sample=False), expected)
