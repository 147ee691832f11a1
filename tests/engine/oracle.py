"""What a request must give: native ``generate`` on its prompt alone, up to near-ties."""

import random

import torch

NEAR_TIE = 1e-4  # float32 logits of two candidates that rounding may exchange


def prompts(count, low, high, seed=0, vocabulary=101):
    """Random token ids, lengths low..high."""
    chance = random.Random(seed)
    return [[chance.randrange(vocabulary) for _ in range(chance.randint(low, high))] for _ in range(count)]


def native(model, prompt, **options):
    """New tokens of one row."""
    with torch.no_grad():
        ids = torch.tensor([prompt])
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def is_near_tie(model, prompt, expected, got):
    """Whether the first differing tokens have logits closer than NEAR_TIE."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if at is None:
        return False
    with torch.no_grad():
        logits = model(torch.tensor([prompt + expected[:at]])).logits[0, -1]
    return abs(float(logits[expected[at]] - logits[got[at]])) < NEAR_TIE


def first_departure(model, prompt, got):
    """The first of these tokens that is not the model's own choice after all before it: (index, how far its logit lies
    below that of the choice), or None. One forward; as long as none departs, the tokens are those of ``generate``."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
    gaps = logits.amax(-1) - logits.gather(1, torch.tensor(got)[:, None])[:, 0]
    return next(((i, gap) for i, gap in enumerate(gaps.tolist()) if gap > 0), None)


def assert_native(model, results, near_ties_allowed=None, **options):
    """Every result has the greedy tokens of its prompt alone; near-ties in at most 1 of 100 requests."""
    near_ties = 0
    for result in results:
        expected = native(model, result.prompt_ids, do_sample=False, **options)
        assert result.error is None, result
        if result.token_ids != expected:
            assert is_near_tie(model, result.prompt_ids, expected, result.token_ids), (result, expected)
            near_ties += 1
    allowed = len(results) // 100 if near_ties_allowed is None else near_ties_allowed
    assert near_ties <= allowed, f"{near_ties} near-ties in {len(results)} requests"
