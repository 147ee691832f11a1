"""A request is computed by the model under which it was added, or ends with an error that names the change."""

from __future__ import annotations

import copy

import pytest
import torch

from ..adapters import set_scale, swap_data, with_adapters
from .conftest import build_llama
from .oracle import native, prompts, run

PROMPT = prompts(1, 41, 41, seed=2)[0]


def adapted(targets=("q_proj", "k_proj", "v_proj"), layers=2):
    """The transformers model inside a PEFT wrapper, and the wrapper."""
    wrapper = with_adapters(build_llama(num_hidden_layers=layers), target_modules=list(targets))
    return wrapper.get_base_model(), wrapper


def write(wrapper):
    with torch.no_grad():
        wrapper.get_base_model().model.layers[0].self_attn.k_proj.base_layer.weight.mul_(-1.5)


def replace_weight(wrapper):
    projection = wrapper.get_base_model().model.layers[0].self_attn.k_proj.base_layer
    projection.weight = torch.nn.Parameter(-1.5 * projection.weight.detach(), requires_grad=False)


def replace_module(wrapper):
    layers = wrapper.get_base_model().model.layers
    layers[0] = copy.deepcopy(layers[0])
    with torch.no_grad():
        layers[0].self_attn.k_proj.base_layer.weight.mul_(-1.5)


def add_and_set(wrapper):
    wrapper.add_adapter("three", wrapper.peft_config["one"])
    wrapper.eval()
    wrapper.set_adapter("three")


CHANGES = {
    "adapter": (lambda wrapper: wrapper.set_adapter("two"), "adapters"),
    "scale": (lambda wrapper: set_scale(wrapper, "one", 0.1), "scaling"),
    "merge": (lambda wrapper: wrapper.merge_adapter(), "merged adapters"),
    "weight": (write, "weights"),
    "replaced weight": (replace_weight, "weights"),
    "replaced module": (replace_module, "weights"),
    "new adapter": (add_and_set, "adapters"),
    "hot-swap": (lambda wrapper: swap_data(wrapper, "two", "one"), "values"),
    "attribute": (
        lambda wrapper: setattr(wrapper.get_base_model().model.layers[0].self_attn, "scaling", 1.0),
        "attributes",
    ),
}


def greedy(engine, tokens=6, **options):
    return engine.add_request(PROMPT, max_new_tokens=tokens, do_sample=False, **options)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [0, 2])
def test_changed_between_add_and_step(make_engine, change, steps):
    """Also between two steps; writes through .data are then seen when the next request is added."""
    model, wrapper = adapted()
    engine = make_engine(model)
    before = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    cached = engine.generate([PROMPT], max_new_tokens=6)[0]
    assert cached.token_ids == before
    first = greedy(engine, tokens=12)
    for _ in range(steps):
        engine.step()
    act, words = CHANGES[change]
    act(wrapper)
    after = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    second = greedy(engine)
    results = run(engine)
    assert results[first].finish_reason == "error"
    assert words in results[first].error
    assert results[second].token_ids == after
    assert results[second].num_cached_tokens == 0
    again = engine.generate([PROMPT], max_new_tokens=6)[0]
    assert (again.token_ids, again.num_cached_tokens) == (after, 40)


@pytest.mark.parametrize("change", ["adapter", "scale"])
def test_a_later_request_under_the_first_adapter_has_its_tokens(make_engine, change):
    """What was begun under one key and changed is not found under it."""
    model, wrapper = adapted()
    engine = make_engine(model)
    one = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    greedy(engine)
    CHANGES[change][0](wrapper)
    run(engine)
    wrapper.set_adapter("one")
    set_scale(wrapper, "one", 1.0)
    result = engine.generate([PROMPT], max_new_tokens=6)[0]
    assert (result.token_ids, result.num_cached_tokens) == (one, 0)
    result = engine.generate([PROMPT], max_new_tokens=6)[0]
    assert (result.token_ids, result.num_cached_tokens) == (one, 40)


def test_a_model_that_changes_within_a_step_gives_no_tokens_of_it(make_engine):
    """The forward of a class changes the adapter, as another thread may: blocks of that step are not published."""
    model, wrapper = adapted()
    engine = make_engine(model)
    one = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    first = greedy(engine)
    norm = model.model.layers[1].input_layernorm
    kind, forward = type(norm), type(norm).forward

    def change(self, hidden):
        if self is norm:
            wrapper.set_adapter("two")
        return forward(self, hidden)

    kind.forward = change
    try:
        assert run(engine)[first].token_ids == []
    finally:
        kind.forward = forward
    wrapper.set_adapter("one")
    result = engine.generate([PROMPT], max_new_tokens=6)[0]
    assert (result.token_ids, result.num_cached_tokens) == (one, 0)


def test_other_requests_go_on(make_engine):
    """A sampled and a drafted request that were added after the change have the tokens of an undisturbed run."""
    model, wrapper = adapted()
    sampled = {"do_sample": True, "num_return_sequences": 2, "seed": 3, "max_new_tokens": 8}
    drafted = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8}
    wrapper.set_adapter("two")
    expected = [make_engine(model).generate([PROMPT], **options) for options in (sampled, drafted)]
    wrapper.set_adapter("one")
    engine = make_engine(model)
    old = greedy(engine)
    engine.step()
    wrapper.set_adapter("two")
    new = [engine.add_request(PROMPT, **options) for options in (sampled, drafted)]
    found = []
    while engine.stats().num_running + engine.stats().num_waiting:
        found += engine.step().finished
    assert [result.finish_reason for result in found if result.request_id == old] == ["error"]
    for request, results in zip(new, expected, strict=True):
        got = {result.sample: result.token_ids for result in found if result.request_id == request}
        assert got == {result.sample: result.token_ids for result in results}


def test_scale_is_identity(make_engine):
    model, wrapper = adapted()
    engine = make_engine(model)
    for scale in (1.0, 0.1, 1.0):
        set_scale(wrapper, "one", scale)
        expected = native(model, PROMPT, max_new_tokens=6, do_sample=False)
        assert engine.generate([PROMPT], max_new_tokens=6)[0].token_ids == expected


def test_a_compiled_engine_refuses_another_scale(make_engine, untuned):
    model, wrapper = adapted(["v_proj"], layers=1)
    engine = make_engine(model, compile=True)
    expected = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    assert engine.generate([PROMPT], max_new_tokens=6)[0].token_ids == expected
    request = greedy(engine)
    set_scale(wrapper, "one", 0.1)
    with pytest.raises(ValueError, match=r"compiled .* \(scaling of adapters\); make a new Engine"):
        engine.generate([PROMPT], max_new_tokens=6)
    result = run(engine)[request]
    assert result.finish_reason == "error"
    assert "scaling" in result.error
    set_scale(wrapper, "one", 1.0)
    assert engine.generate([PROMPT], max_new_tokens=6)[0].token_ids == expected
    swap_data(wrapper, "two", "one")
    with pytest.raises(ValueError, match="values of weights"):
        greedy(engine)
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="forward hooks"):
        greedy(engine)
    handle.remove()


def test_hooks_neither_hit_nor_publish(make_engine):
    model = build_llama()
    engine = make_engine(model)
    plain = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    assert engine.generate([PROMPT], max_new_tokens=6)[0].token_ids == plain
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: -out)
    steered = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    assert steered != plain
    for _ in range(2):
        result = engine.generate([PROMPT], max_new_tokens=6)[0]
        assert (result.token_ids, result.num_cached_tokens) == (steered, 0)
    handle.remove()
    result = engine.generate([PROMPT], max_new_tokens=6)[0]
    assert (result.token_ids, result.num_cached_tokens) == (plain, 40)


def test_hooks_that_come_while_a_request_runs_are_not_published(make_engine):
    model = build_llama()
    engine = make_engine(model)
    plain = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    request = greedy(engine)
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: -out)
    steered = native(model, PROMPT, max_new_tokens=6, do_sample=False)
    assert run(engine)[request].token_ids == steered
    handle.remove()
    result = engine.generate([PROMPT], max_new_tokens=6)[0]
    assert (result.token_ids, result.num_cached_tokens) == (plain, 0)


def test_values_written_unseen_between_add_and_the_first_step(make_engine):
    """With no further request whose beginning would look for them."""
    model, wrapper = adapted(layers=1)
    engine = make_engine(model)
    first = greedy(engine)
    swap_data(wrapper, "two", "one")
    result = run(engine)[first]
    assert (result.finish_reason, result.token_ids) == ("error", [])
    assert "values" in result.error
