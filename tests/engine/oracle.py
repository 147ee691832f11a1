"""What a request must give: native ``generate`` on its prompt alone, up to near-ties."""

import random

import torch

NEAR_TIE = 1e-4  # float32 logits of two candidates that rounding may exchange


def prompts(count, low, high, seed=0, vocabulary=101):
    """Random token ids, lengths low..high."""
    chance = random.Random(seed)
    return [[chance.randrange(vocabulary) for _ in range(chance.randint(low, high))] for _ in range(count)]


def native(model, prompt, **options):
    """New tokens of one row. Greedy ones of a model that nobody changes (`known`) are computed once."""
    key = (*prompt, repr(options))
    known = getattr(model, "known", None) if options.get("do_sample") is False and "streamer" not in options else None
    if known is None or key not in known:
        with torch.no_grad():
            ids = torch.tensor([prompt])
            tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        if known is None:
            return tokens
        known[key] = tokens
    return known[key].copy()


def run(engine):
    """Step until nothing is left; the results of requests with one sample, by their ids."""
    found = {}
    while not engine.is_idle:
        found |= {result.request_id: result for result in engine.step().finished}
    return found


def is_near_tie(model, prompt, expected, got):
    """Whether the first differing tokens have logits closer than NEAR_TIE."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if at is None:
        return False
    with torch.no_grad():
        logits = model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
    return abs(float(logits[expected[at]] - logits[got[at]])) < NEAR_TIE


def count_near_ties(model, results, **options):
    """How many results part from the greedy tokens of the prompt alone; one that does so at no near-tie fails."""
    near_ties = 0
    for result in results:
        expected = native(model, result.prompt_ids, do_sample=False, **options)
        assert result.error is None, result
        if result.token_ids != expected:
            assert is_near_tie(model, result.prompt_ids, expected, result.token_ids), (result, expected)
            near_ties += 1
    return near_ties


def count_scored_near_ties(model, result):
    """How many tokens are not the model's choice after those before them, in one forward; fails but at near-ties."""
    start = len(result.prompt_ids)
    with torch.no_grad():
        logits = model(torch.tensor([result.prompt_ids + result.token_ids])).logits[0, start - 1 : -1]
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
    assert result.error is None, result
    assert behind.max() < NEAR_TIE, (result, behind)
    return int((behind > 0).sum())


def assert_native(model, results, near_ties_allowed=None, **options):
    """Every result has the greedy tokens of its prompt alone; near-ties in at most 1 of 100 requests."""
    near_ties = count_near_ties(model, results, **options)
    allowed = len(results) // 100 if near_ties_allowed is None else near_ties_allowed
    assert near_ties <= allowed, f"{near_ties} near-ties in {len(results)} requests"
