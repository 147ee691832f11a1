"""Integers, numbers, memory and aliases at their edges: refused by name or right, never a fault."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

import pytest
import torch

import pagedkv_ops
from pagedkv_ops import reference

from . import fuzz, oracle
from .builders import make_case
from .memory import sparse

LIMIT = 2**63 - 1
WINDOWS = (2**31 - 2, 2**31 - 1, 2**31, 2**61, 2**62, LIMIT)


def both(name):
    functions = [getattr(pagedkv_ops, name), getattr(reference, name)]
    return pytest.mark.parametrize("function", functions, ids=["op", "reference"])


ATTENTIONS = both("paged_attention_with_lse")
MERGES = both("merge_states")


def mapping(*pairs):
    return torch.tensor(pairs).reshape(-1, 2)


# integers


@ATTENTIONS
def test_window_at_the_end_of_the_integers_still_checks_the_table(function):
    """Three keys, twenty query rows: position - window_left must not wrap to a window that hides the bad block."""
    key_cache, value_cache = torch.randn(2, 4, 16, 1, 32)
    args = (torch.randn(20, 1, 32), key_cache, value_cache, torch.tensor([[10**8]]), torch.tensor([3]))
    with pytest.raises(RuntimeError, match=r"block_table\[0, 0\] must be in 0\.\.3 \(num_blocks - 1\), got 100000000"):
        function(*args, torch.tensor([0, 20]), window_left=LIMIT)


@ATTENTIONS
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("query_len", "seq_len"), [(20, 3), (5, 2048), (1, 2048)])
@pytest.mark.parametrize("num_splits", [0, 1])
def test_longest_windows_hide_nothing(function, window, query_len, seq_len, num_splits):
    case = make_case(query_lens=(query_len,), seq_lens=(seq_len,), heads=(1, 1), head_size=8, block_size=16)
    for causal in (False, True):
        unlimited = function(*case.args, causal=causal, num_splits=num_splits)
        limited = function(*case.args, causal=causal, window_left=window, window_right=window, num_splits=num_splits)
        torch.testing.assert_close(limited, unlimited, rtol=0, atol=0)


@pytest.mark.parametrize("size", [2**31, 2**62 + 1])
def test_block_size_by_expand_is_refused(size):
    cache = torch.zeros(1, 1, 1, 1).expand(1, size, 1, 1)
    table, seq_lens = torch.tensor([[0, 0]]), torch.tensor([1])
    text = rf"cache.size\(1\) must be in 1\.\.2147483647 \(block_size\), got {size}"
    for module in (pagedkv_ops, reference):
        with pytest.raises(RuntimeError, match=text):
            module.paged_attention(torch.zeros(1, 1, 1), cache, cache, table, seq_lens)
        with pytest.raises(RuntimeError, match=text):
            module.gather_kv(cache, table, seq_lens, 4)


@ATTENTIONS
def test_capacity_beyond_64_bits(function):
    """A table of 2^40 columns by expand: W * S = 2^70 bounds nothing, and lengths stay what they are."""
    cache = torch.ones(1, 1, 1, 4).expand(1, 2**30, 1, 4)
    table = torch.tensor([[0]]).expand(1, 2**40)
    out, lse = function(torch.zeros(1, 1, 4), cache, cache, table, torch.tensor([5]))
    assert (out.mean().item(), lse.item()) == (1.0, pytest.approx(math.log(5)))
    with pytest.raises(RuntimeError, match=r"seq_lens\[0\] must be in 0\.\.\d+ .*, got -1"):
        function(torch.zeros(1, 1, 4), cache, cache, table, torch.tensor([-1]))


@both("gather_kv")
def test_gather_of_no_heads_returns_at_once(function):
    out = function(torch.zeros(2, 4, 0, 8), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([5]), 2**40)
    assert out.shape == (1, 2**40, 0, 8)


# strides


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_beyond_32_bits(dim, dtype):
    """As of a cache [32, 40000, 16, 128] seen as permute(1, 2, 0, 3), with 2^31 elements from one index to the next."""
    strides = [64, 16, 8]
    strides[dim] = 2**31 + 64
    key_cache, value_cache = (sparse((2, 4, 2, 8), (*strides, 1), dtype) for _ in range(2))
    key, value = torch.randn(2, 5, 2, 8).to(dtype)
    query, table, seq_lens = torch.randn(3, 4, 8).to(dtype), torch.tensor([[1, 0]]), torch.tensor([5])
    pagedkv_ops.write_kv(key, value, key_cache, value_cache, torch.tensor([4, 5, 6, 7, 0]))
    assert torch.equal(pagedkv_ops.gather_kv(value_cache, table, seq_lens, 5)[0], value)
    args = (query, key_cache, value_cache, table, seq_lens, torch.tensor([0, 3]))
    out, lse = pagedkv_ops.paged_attention_with_lse(*args)
    exact, exact_lse = oracle.paged_attention_with_lse(*args)
    torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    expected = value_cache[1].clone()
    pagedkv_ops.copy_blocks([value_cache], mapping((1, 0)))
    assert torch.equal(value_cache[0], expected)


def test_strides_of_dimensions_of_size_one_mean_nothing():
    """One KV head: the caches share elements whatever stride that dimension claims."""
    memory = torch.zeros(200)
    key_cache = memory.as_strided((2, 4, 1, 8), (32, 8, 999, 1), 0)
    value_cache = memory.as_strided((2, 4, 1, 8), (32, 8, 5, 1), 8)
    for module in (pagedkv_ops, reference):
        with pytest.raises(RuntimeError, match="key_cache and value_cache must not share elements"):
            module.write_kv(torch.zeros(1, 1, 8), torch.zeros(1, 1, 8), key_cache, value_cache, torch.tensor([0]))


# aliases


@both("swap_blocks")
def test_swap_between_aliases_whose_blocks_are_not_outermost(function):
    storage = torch.arange(64.0)
    src = storage.as_strided((2, 1, 2, 4), (4, 4, 16, 1), 0)
    dst = storage.as_strided((4, 1, 2, 4), (4, 4, 24, 1), 8)
    expected = [src[0].clone(), src[1].clone()]
    function(src, dst, mapping((0, 2), (1, 3)))
    assert torch.equal(dst[2], expected[0])
    assert torch.equal(dst[3], expected[1])


@both("copy_blocks")
def test_tensors_of_one_list_may_alias(function):
    """Every source of every tensor is read before any destination is written; tensors are written in order."""
    storage = torch.arange(5.0)[:, None].repeat(1, 3)
    function([storage[:3], storage[1:4]], mapping((0, 1), (1, 2)))
    assert storage[:, 0].tolist() == [0.0, 0.0, 1.0, 2.0, 4.0]
    storage = torch.arange(4.0)[:, None].repeat(1, 3)
    function([storage, storage], mapping((0, 1), (1, 2)))
    assert storage[:, 0].tolist() == [0.0, 0.0, 1.0, 3.0]


@both("write_kv")
def test_new_tokens_may_be_rows_of_the_caches(function):
    key_cache, value_cache = torch.arange(8.0)[:, None].repeat(1, 4).view(2, 4, 1, 4), torch.zeros(2, 4, 1, 4)
    rows = key_cache.view(8, 1, 4)
    function(rows[0:4], rows[2:6], key_cache, value_cache, torch.tensor([1, 2, 3, 4]))
    assert key_cache[..., 0, 0].flatten().tolist() == [0.0, 0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0]
    assert value_cache[..., 0, 0].flatten().tolist() == [0.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 0.0]


@both("paged_attention_append")
def test_the_query_may_be_a_row_of_the_cache(function):
    key_cache, value_cache = torch.randn(2, 1, 4, 1, 8)
    rows = key_cache.view(4, 1, 8)
    args = (torch.randn(1, 1, 8), torch.randn(1, 1, 8), key_cache, value_cache, torch.tensor([3]))
    tail = (torch.tensor([[0]]), torch.tensor([4]))
    expected = oracle.paged_attention_append(rows[3:].clone(), *(t.clone() for t in args), *tail)
    torch.testing.assert_close(function(rows[3:], *args, *tail).double(), expected, rtol=1e-5, atol=1e-5)


# numbers


@ATTENTIONS
@pytest.mark.parametrize("softcap", [1e-300, 1e-50, 1e-40, 1e-30, 3e38, 1e39, 1e300])
@pytest.mark.parametrize("query_len", [1, 20])
@pytest.mark.parametrize("zero", [False, True])
def test_softcap_that_float32_can_not_hold(function, softcap, query_len, zero):
    """So small a cap leaves logits of 0, so large a one leaves them as they are; neither gives NaN."""
    case = make_case(query_lens=(query_len,), seq_lens=(40,))
    if zero:
        case.query.zero_()
    exact, exact_lse = oracle.paged_attention_with_lse(*case.args, softcap=softcap)
    out, lse = function(*case.args, softcap=softcap)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@ATTENTIONS
@pytest.mark.parametrize("query_len", [1, 20])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_logit_of_infinity(function, query_len, num_splits):
    """The lse stays +inf; the row itself is NaN, as that of torch.softmax."""
    case = make_case(query_lens=(query_len,), seq_lens=(70,), heads=(2, 1))
    case.query.abs_()
    slot = case.slots(0, range(9, 10))[0]
    case.key_cache[slot // 4, slot % 4] = math.inf
    out, lse = function(*case.args, causal=False, num_splits=num_splits)
    assert lse.isposinf().all()
    assert out.isnan().all()


@MERGES
def test_merge_takes_nothing_of_a_part_that_saw_nothing(function):
    nan = torch.full((1, 1, 3), math.nan)
    out, nothing, lse = torch.arange(3.0).view(1, 1, 3), torch.tensor([[-math.inf]]), torch.tensor([[2.5]])
    for parts in ((out, lse, nan, nothing), (nan, nothing, out, lse)):
        merged, merged_lse = function(*parts)
        assert torch.equal(merged, out)
        assert torch.equal(merged_lse, lse)
    merged, merged_lse = function(nan, nothing, nan, nothing)
    assert torch.equal(merged, torch.zeros(1, 1, 3))
    assert merged_lse.item() == -math.inf


@MERGES
@pytest.mark.parametrize("other", [-math.inf, -3.0, 3e38, math.inf])
def test_merge_keeps_an_lse_of_infinity(function, other):
    out = torch.ones(1, 1, 3)
    for lses in ((math.inf, other), (other, math.inf)):
        lse_a, lse_b = (torch.tensor([[lse]]) for lse in lses)
        assert function(out, lse_a, out, lse_b)[1].item() == math.inf


# memory


def test_too_little_memory_says_which_op_and_how_many_bytes():
    cache, table, seq_lens = torch.zeros(2, 4, 1, 8), torch.zeros(1, 2, dtype=torch.int64), torch.tensor([5])
    many_heads = cache.expand(2, 4, 2**20, 8)
    query = torch.zeros(1, 1, 8).expand(2**44, 1, 8)
    for module in (pagedkv_ops, reference):
        with pytest.raises(RuntimeError, match=f"^gather_kv: cannot allocate {2**49} bytes for max_len tokens"):
            module.gather_kv(cache, table, seq_lens, 2**44)
        with pytest.raises(RuntimeError, match=r"^gather_kv: cannot allocate 2\*\*63 bytes or more for max_len tokens"):
            module.gather_kv(many_heads, table, seq_lens, 2**40)
        with pytest.raises(RuntimeError, match=f"^paged_attention: cannot allocate {2**49} bytes"):
            module.paged_attention(query, cache, cache, table, seq_lens, torch.tensor([0, 1]))
    slots = torch.tensor([-1]).expand(2**44)
    with pytest.raises(RuntimeError, match=f"^write_kv: cannot allocate {2**47} bytes"):
        pagedkv_ops.write_kv(query, query, cache, cache.clone(), slots)


TIGHT = """
import re, resource, torch, pagedkv_ops
torch.set_num_threads(1)
N = 2**20
cache, ids, lengths = torch.zeros(2 * N, 1), torch.arange(N), torch.ones(N, dtype=torch.int64)
chained, table = torch.stack([ids, ids + 1], 1), torch.zeros(N, 1, dtype=torch.int64)
key, caches = torch.zeros(N, 1, 4), torch.zeros(2, N, 1, 1, 4)
calls = {
    "write_kv": lambda: pagedkv_ops.write_kv(key, key, *caches, ids),
    "write_kv of rows of the cache": lambda: pagedkv_ops.write_kv(caches[0, :, 0], key, *caches, ids),
    "paged_attention": lambda: pagedkv_ops.paged_attention(key, *caches, table, lengths),
    "gather_kv": lambda: pagedkv_ops.gather_kv(caches[0], table, lengths, 1),
    "copy_blocks": lambda: pagedkv_ops.copy_blocks([cache], chained),
    "swap_blocks": lambda: pagedkv_ops.swap_blocks(cache, cache, chained),
}
for name, call in calls.items():
    used = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    for spare in (0, 4, 8, 16, 32, 64, 128, 256, 512):
        resource.setrlimit(resource.RLIMIT_AS, (used + spare * 2**20, -1))
        try:
            call()
            break
        except RuntimeError as error:
            assert re.match(rf"{name.split()[0]}: cannot allocate \\d{{7,}} bytes", str(error)), error
            assert spare < 512
            print(name)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and other systems do not keep to RLIMIT_AS")
def test_every_allocation_that_fails_names_op_and_bytes():
    """Each op with more and more memory, until it works: lists, scratch, copies and results fail in turn."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # what an op frees is given back
    result = subprocess.run([sys.executable, "-c", TIGHT], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.splitlines()) == {
        "write_kv", "write_kv of rows of the cache", "paged_attention", "gather_kv", "copy_blocks", "swap_blocks"
    }  # fmt: skip


SCRATCH = """
import torch, pagedkv_ops
torch.set_num_threads(2)

def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) // 1024

def attend(head_size, num_heads, length, **options):
    cache = torch.zeros(1, 16, 1, head_size)
    table = torch.zeros(1, -(-length // 16), dtype=torch.int64)
    query = torch.zeros(1, num_heads, head_size)
    pagedkv_ops.paged_attention(query, cache, cache, table, torch.tensor([length]), **options)

attend(64, 8, 1024)
before = resident()
attend(4096, 128, 4096, num_splits=256)  # 0.5 GB of partial results and 4 MB of a thread
attend(2**20, 8, 32)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_scratch_of_one_huge_call_is_given_back():
    result = subprocess.run([sys.executable, "-c", SCRATCH], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 150  # MB


# threads


RACE = """
import threading, torch, pagedkv_ops
torch.set_num_threads(1)
table, stop = torch.zeros(64, 2048, dtype=torch.int64), threading.Event()
last = table[-1, -1]  # the last one that is checked, and the last one that is used

def rewrite():
    while not stop.is_set():
        last.fill_(10**12)
        last.fill_(0)

thread = threading.Thread(target=rewrite)
thread.start()
cache, query, lengths = torch.zeros(1, 1, 1, 8), torch.zeros(64, 1, 8), torch.full((64,), 2048)
refused = 0
for _ in range(60):
    for call in (
        lambda: pagedkv_ops.paged_attention(query, cache, cache, table, lengths),
        lambda: pagedkv_ops.gather_kv(cache, table, lengths, 2048),
    ):
        try:
            call()
        except RuntimeError as error:
            assert "must be in 0..0" in str(error), error
            refused += 1
stop.set()
thread.join()
print("refused", refused)
"""


def test_indices_that_another_thread_rewrites_are_read_once():
    """Valid when they are checked, far outside a moment later: what was checked is what is used."""
    result = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert re.match(r"refused \d+", result.stdout)


# fuzzing, a little of it


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_calls_equal_the_reference_and_numpy(first):
    """``make fuzz`` runs more of these, against a sanitized build."""
    assert sum(fuzz.check(seed) for seed in range(first, first + 20)) > 0
