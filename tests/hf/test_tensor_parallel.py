"""Models divided among two processes: by transformers' own plan under patch and engine, and by hand."""

import pytest
import ranks
import torch
import torch.multiprocessing
from models import tiny
from sharded_decoder import Rank, Weights, generate, generate_dense

from pagedkv.tensor_parallel import kv_heads_of_ranks

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch is without gloo"
)


def build(name):
    if name == "llama-3":
        return tiny("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3)
    if name == "one-layer":
        return tiny("llama", num_hidden_layers=1)
    return tiny("llama", num_key_value_heads=int(name[-1]))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the cases of ``ranks.work`` found, per rank."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in ("llama-2", "llama-3", "llama-4", "one-layer"):
        build(name).save_pretrained(folder / name)
    torch.multiprocessing.spawn(ranks.work, (2, folder), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def both(found, name):
    """A case's finding on each rank; a traceback fails the test."""
    for rank in found:
        failed = [text for text in rank.values() if isinstance(text, str)]
        assert not failed, failed[0]
    return [rank[name] for rank in found]


@needs_gloo
@pytest.mark.parametrize("name", ["llama-2", "llama-4", "one-layer"])
def test_tokens_are_those_of_the_whole_model(found, name):
    case = "compiled" if name == "one-layer" else name
    expected = ranks.generated(build(name))
    for rank in both(found, case):
        assert rank["generate"] == expected
        assert rank["engine"] == expected


@needs_gloo
@pytest.mark.parametrize(("name", "kv_heads"), [("llama-2", 1), ("llama-4", 2)])
def test_a_rank_keeps_its_own_heads_in_blocks_and_gives_them_back(found, name, kv_heads):
    for rank in both(found, name):
        assert rank["kv_heads"] == {kv_heads}
        assert rank["used"] == 0 < rank["peak"]


@needs_gloo
def test_all_ranks_have_the_blocks_that_fit_on_each(found):
    for rank in both(found, "sizes"):
        assert rank["patch"] == rank["engine"] == 63
        assert rank["memory"] == 9_000_000 // (16 * 3 * 32 * 4)  # tokens, layers, K and V of a head, bytes


@needs_gloo
def test_a_rank_without_room_stops_the_others(found):
    waiting, failed = both(found, "sizes")
    for text in failed["errors"]:
        assert text.startswith(f"InvalidArgumentError: num_blocks={1 << 50}: expected at most the")
    for text in waiting["errors"]:
        assert (
            text == "InvalidArgumentError: num_blocks: expected blocks on every rank, got none on one, which says why"
        )
    for rank in (waiting, failed):
        assert "is not patched" in rank["is_unpatched"]


@needs_gloo
def test_prefixes_of_other_weights_are_not_reused(found):
    for rank in both(found, "changed weights"):
        for cached, fresh in rank:
            assert cached == fresh
        assert rank[0][1] != rank[1][1]  # the change shows in the tokens


@needs_gloo
def test_heads_that_ranks_would_share_are_refused(found):
    for rank in both(found, "refusals"):
        for text in rank:
            assert text.startswith("UnsupportedModelError: pagedkv: LlamaForCausalLM can not be served from blocks: ")
            assert "its 3 KV heads can not be divided evenly among 2 tensor parallel ranks" in text


@needs_gloo
@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_own_model_over_local_heads(found, num_kv_heads):
    expected = generate_dense(Weights(8, num_kv_heads), [3, 1, 4, 1, 5], 12)
    assert len(set(expected)) > 3
    for rank in both(found, f"own {num_kv_heads}"):
        assert rank == {"tokens": expected, "num_blocks": 63}


def test_copies_of_kv_heads_on_four_ranks():
    """The output of every layer is the sum over ranks, formed here in one process."""
    weights = Weights(8, 2)
    others = [Rank(weights, rank, 4, 16, None) for rank in range(4)]
    assert [rank.layers[0][0].shape[0] for rank in others] == [2, 2, 2, 2]
    assert [rank.cache.layers[0].num_kv_heads for rank in others] == [1, 1, 1, 1]

    class All(Rank):
        def step(self, *args):
            return sum(rank.step(*args) for rank in others)

    whole = All(weights, 0, 1, 16, lambda total: total)
    assert generate(whole, [3, 1, 4, 1, 5], 12) == generate_dense(weights, [3, 1, 4, 1, 5], 12)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_ranks", "expected"),
    [
        (8, 2, 4, [[0], [0], [1], [1]]),
        (8, 2, 1, [[0, 1]]),
        (8, 4, 2, [[0, 1], [2, 3]]),
        (8, 1, 8, [[0]] * 8),
        (12, 6, 3, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_kv_heads_of_ranks(heads, kv_heads, num_ranks, expected):
    assert [list(held) for held in kv_heads_of_ranks(heads, kv_heads, num_ranks)] == expected


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((6, 3, 2), r"num_kv_heads: expected a multiple or a divisor of num_ranks \(2\), got 3"),
        ((6, 2, 4), r"num_heads: expected a multiple of num_ranks \(4\), got 6"),
        ((8, 3, 2), r"num_heads: expected a multiple of num_kv_heads \(3\), got 8"),
        ((8, 2, 0), "num_ranks: expected at least 1, got 0"),
    ],
)
def test_heads_that_ranks_can_not_hold(arguments, text):
    with pytest.raises(ValueError, match=text):
        kv_heads_of_ranks(*arguments)
