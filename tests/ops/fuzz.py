"""Random valid and invalid calls of every op, compared with the reference and with numpy, against an address-sanitized
extension.

``make fuzz`` runs ``python -m tests.ops.fuzz --build --seconds 60``: ``--build`` compiles a sanitized copy of the
package under build/ and starts this program again with it. A call that the reference accepts must give the same result
and caches, and that of ``oracle.py``; one that it refuses must raise the same error and leave every tensor as it was.
Tensors end at a page that may not be touched, or caches stretch over more than 2^31 elements. Each call has a seed of
its own; a failure prints the arguments that repeat it.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import pagedkv_ops
from pagedkv_ops import reference

from . import oracle
from .builders import (
    APPEND_ARGUMENTS,
    ATTENTION_ARGUMENTS,
    FLOATS,
    INDEX_DTYPES,
    WRITE_ARGUMENTS,
    attention_options,
    make_caches,
    make_case,
    sliced,
    strided_index,
)
from .memory import guarded, sparse
from .quantised import KINDS, LARGEST, TYPES, append_args, make_quantised, new_scales, write_options

SOFTCAPS = (5.0, 5.0, 1e-50, 1e-30, 3e38, 1e300)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Call = tuple[str, dict[str, Any]]


def nasty(rng: random.Random, dtype: torch.dtype) -> int:
    """An integer that is near a bound, far outside, or harmless."""
    values = [0, 1, 2, 3, 5, 8, 13, 40, 100, -1, -2, -7, 2**15, 2**31 - 1, -(2**31)]
    if dtype == torch.int64:
        values += [2**31, 2**32, 2**32 + 1, 2**62, -(2**62), 2**63 - 1, -(2**63)]
    return rng.choice(values)


def spoil(rng: random.Random, tensor: Tensor) -> Tensor:
    """Up to three elements replaced."""
    if tensor.numel():
        for _ in range(rng.randint(1, 3)):
            index = tuple(rng.randrange(size) for size in tensor.shape)
            tensor[index] = nasty(rng, tensor.dtype)
    return tensor


def random_lengths(rng: random.Random) -> tuple[list[int], list[int]]:
    count = rng.choice([0, 1, 1, 2, 3, 5])
    query_lens = [rng.choice([0, 1, 1, 1, 2, 5, 17, 33]) for _ in range(count)]
    seq_lens = [max(0, n + rng.choice([-1, 0, 0, 1, 7, 40])) for n in query_lens]
    return query_lens, seq_lens


def window(rng: random.Random) -> int:
    """Mostly one that hides something, else one at the end of the integers."""
    return rng.choice([rng.randrange(12), rng.randrange(5), rng.choice([2**31 - 2, 2**31, 2**61, 2**62, 2**63 - 1])])


def attention_call(rng: random.Random, op: str) -> Call:
    invalid = rng.random() < 0.6
    group, num_kv_heads = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 3])
    num_heads = group * num_kv_heads
    options: dict[str, Any] = {"num_splits": rng.choice([0, 0, 1, 2, 7])}
    options |= rng.choice([{}, {"causal": False}, {"window_left": window(rng)}, {"softcap": rng.choice(SOFTCAPS)}])
    if not options.get("causal", True):
        options |= rng.choice([{}, {"window_right": window(rng)}, {"window_left": 3, "window_right": 0}])
    query_lens, seq_lens = random_lengths(rng)
    shape: dict[str, Any] = {
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "heads": (num_heads, num_kv_heads),
        "head_size": rng.choice([1, 7, 16, 33, 64, 130]),
        "v_head_size": rng.choice([None, 1, 5, 16, 40]),
        "block_size": rng.choice([1, 2, 3, 4, 16, 31]),
        "dtype": rng.choice(FLOATS),
        "index_dtype": rng.choice(INDEX_DTYPES),
        "layout": rng.choice(["nhd", "hnd", "interleaved"]),
        "strided": rng.random() < 0.3,
        # a table that is wrong but in range shows other blocks, whose masked NaN the reference lets through
        "fill": 0.5 if invalid else math.nan,
        "padding_rows": rng.choice([0, 0, 2]),
        "options": attention_options(num_heads, alibi=rng.random() < 0.2, sinks=rng.random() < 0.2, **options),
        "seed": rng.randrange(2**31),
        "placement_seed": rng.randrange(2**31),
    }
    appends = op == "paged_attention_append"
    if query_lens and rng.random() < 0.4:
        call = quantised_attention(rng, appends, invalid, shape)
    else:
        case = make_case(**shape, cache_dtype=rng.choice((None, *FLOATS)))
        names, args = (APPEND_ARGUMENTS, case.append_args()) if appends else (ATTENTION_ARGUMENTS, case.args)
        call = dict(zip(names, args, strict=True)) | case.options
    if invalid:
        target = rng.choice(["block_table", "seq_lens", "cu_seqlens_q", "slot_mapping", "width"])
        if target == "width":
            call["block_table"] = call["block_table"][:, : rng.randint(0, call["block_table"].size(1))]
        elif target == "slot_mapping" and target in call:
            spoil_slots(rng, call[target])
        elif call.get(target) is not None:
            call[target] = spoil(rng, call[target])
    return op, call


def quantised_kinds(rng: random.Random) -> tuple[Any, Any]:  # types, kinds of scale: of keys and of values
    return (rng.choice(TYPES), rng.choice(TYPES)), (rng.choice(KINDS), rng.choice(KINDS))


def quantised_attention(rng: random.Random, appends: bool, invalid: bool, shape: dict[str, Any]) -> dict[str, Any]:
    case, written = make_quantised(*quantised_kinds(rng), **shape)
    if invalid:  # as with the fill of other caches
        for tensor in (case.key_cache, case.value_cache, *case.options.values()):
            if isinstance(tensor, Tensor):
                tensor.copy_(tensor.float().nan_to_num(0.5).to(tensor.dtype))
    if not appends:
        return dict(zip(ATTENTION_ARGUMENTS, case.args, strict=True)) | case.options
    options = {name: value for name, value in case.options.items() if name not in ("k_scale", "v_scale")}
    return dict(zip(APPEND_ARGUMENTS, append_args(case), strict=True)) | options | written


def spoil_slots(rng: random.Random, slots: Tensor) -> None:
    """Out of range or negative only: which of two equal slots wins is not defined."""
    for _ in range(rng.randint(1, 3)):
        value = nasty(rng, slots.dtype)
        if slots.numel() and not 0 <= value < 2**15:
            slots[rng.randrange(slots.numel())] = value


def random_pool(rng: random.Random, types: tuple[torch.dtype, ...] = FLOATS) -> tuple[Tensor, Tensor]:
    caches = make_caches(
        rng.choice([1, 2, 5, 9]),
        rng.choice([1, 3, 4, 16]),
        rng.choice([1, 2, 5]),
        rng.choice([1, 7, 16, 64, 130]),
        rng.choice([1, 5, 16, 96]),
        rng.choice(types),
        rng.choice(["nhd", "hnd", "interleaved"]),
        0.0,
    )
    for cache in caches:
        cache.copy_(torch.arange(cache.numel()).view(cache.shape) % 127)
    return caches


def write_call(rng: random.Random) -> Call:
    key_cache, value_cache = random_pool(rng)
    types, kinds = quantised_kinds(rng)
    if quantised := rng.random() < 0.5:
        key_cache, value_cache = (c.to(dtype) for c, dtype in zip((key_cache, value_cache), types, strict=True))
    num_tokens = rng.choice([0, 1, 2, 7, 40])
    key, value = (
        torch.randn(num_tokens, cache.size(2), cache.size(3)).to(rng.choice(FLOATS))
        for cache in (key_cache, value_cache)
    )
    slots = torch.full((max(0, num_tokens - rng.choice([0, 0, 1])),), -1)
    order = torch.randperm(key_cache.size(0) * key_cache.size(1))[: slots.numel()]
    slots[: order.numel()] = order
    slots = slots.to(rng.choice(INDEX_DTYPES))
    scales: dict[str, Tensor] = {}
    if quantised:
        tensors = zip(kinds, types, (key, value), (key_cache, value_cache), strict=True)
        scales = write_options(kinds, tuple(new_scales(*each) for each in tensors))  # type: ignore[arg-type]
    if rng.random() < 0.3:
        key, value, slots = sliced(key), sliced(value), strided_index(slots)
    if rng.random() < 0.5:
        spoil_slots(rng, slots)
    return "write_kv", dict(zip(WRITE_ARGUMENTS, (key, value, key_cache, value_cache, slots), strict=True)) | scales


def mapping_call(rng: random.Random, op: str) -> Call:
    if rng.random() < 0.3:
        return aliased_call(rng, op)
    src, other = random_pool(rng, (*FLOATS, *TYPES))
    dst = torch.zeros(rng.choice([1, 4, 10]), *src.shape[1:], dtype=src.dtype) if rng.random() < 0.7 else src
    num_dst = dst.size(0) if op == "swap_blocks" else src.size(0)
    count = rng.randint(0, num_dst)
    pairs = torch.stack([torch.randint(src.size(0), (count,)), torch.randperm(num_dst)[:count]], 1)
    pairs = pairs.to(rng.choice(INDEX_DTYPES))
    if rng.random() < 0.3:
        pairs = strided_index(pairs)
    if rng.random() < 0.5:
        spoil(rng, pairs)
    if op == "swap_blocks":
        return op, {"src": src, "dst": dst, "block_mapping": pairs}
    return op, {"caches": [src, other, torch.arange(float(src.size(0)))], "block_mapping": pairs}


def random_view(rng: random.Random, memory: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """A view of ``memory`` whose dimensions lie in any order, with gaps; the first one is blocks."""
    strides, reach = [0] * len(sizes), 1
    for dim in rng.sample(range(len(sizes)), len(sizes)):
        strides[dim] = reach + rng.choice([0, 0, 1, 5])
        reach = strides[dim] * max(sizes[dim], 1)
    return memory.as_strided(sizes, strides, rng.randrange(memory.numel() - reach))


def aliased_call(rng: random.Random, op: str) -> Call:
    """Views of one storage that reach into one another."""
    memory = torch.arange(4096.0)
    shape = tuple(rng.randint(1, 3) for _ in range(rng.randint(0, 3)))
    views = [random_view(rng, memory, (rng.randint(1, 5), *shape)) for _ in range(2)]
    num_src, num_dst = views[0].size(0), views[1].size(0)
    if op == "copy_blocks":
        num_src = num_dst = min(num_src, num_dst)
    dst = torch.randperm(num_dst)[: rng.randint(0, num_dst)]
    pairs = torch.stack([torch.randint(num_src, dst.shape), dst], 1)
    if op == "copy_blocks":
        return op, {"caches": views, "block_mapping": pairs}
    return op, {"src": views[0], "dst": views[1], "block_mapping": pairs}


def gather_call(rng: random.Random) -> Call:
    cache, _ = random_pool(rng, (*FLOATS, *TYPES))
    batch, width = rng.choice([0, 1, 3]), rng.choice([0, 1, 2, 5])
    dtype = rng.choice(INDEX_DTYPES)
    table = torch.randint(cache.size(0), (batch, width)).to(dtype)
    seq_lens = torch.randint(width * cache.size(1) + 1, (batch,)).to(dtype)
    if rng.random() < 0.5:
        spoil(rng, rng.choice([table, seq_lens]))
    call = {"cache": cache, "block_table": table, "seq_lens": seq_lens, "max_len": rng.choice([0, 1, 5, 16, 90])}
    if cache.dtype in TYPES:
        shape = rng.choice([cache.shape[:3], cache.shape[2:3], (1,)])
        call |= {"scale": torch.rand(shape) / LARGEST[cache.dtype], "dtype": rng.choice((None, *FLOATS))}
    return "gather_kv", call


def merge_call(rng: random.Random) -> Call:
    shape, dtype = (rng.choice([0, 1, 5, 33]), rng.choice([1, 3]), rng.choice([1, 7, 64, 130])), rng.choice(FLOATS)
    out_a, out_b = torch.randn(2, *shape).to(dtype)
    lse_a, lse_b = torch.randn(2, *shape[:2]).mul(5)
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        unseen = torch.rand(shape[:2]) < 0.2
        lse[unseen], out[unseen] = -math.inf, rng.choice([0.0, math.nan])
    if rng.random() < 0.3:
        out_a, lse_b = sliced(out_a), lse_b.T.contiguous().T
    return "merge_states", {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


def random_call(seed: int) -> Call:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.randrange(10)
    if kind < 6:
        ops = ("paged_attention", "paged_attention_with_lse", "paged_attention_append")
        return attention_call(rng, rng.choice(ops))
    if kind == 6:
        return write_call(rng)
    if kind == 7:
        return mapping_call(rng, rng.choice(["copy_blocks", "swap_blocks"]))
    return gather_call(rng) if kind == 8 else merge_call(rng)


def far(rng: random.Random, cache: Tensor) -> Tensor:
    """A copy in which one dimension steps over more than 2^31 elements, in memory that is never used otherwise."""
    dim = rng.randrange(cache.dim() - 1)
    inner = [size for d, size in enumerate(cache.shape) if d != dim]
    strides = [math.prod(inner[d:]) for d in range(1, len(inner) + 1)]
    strides.insert(dim, 2**31 + 64)
    return sparse(tuple(cache.shape), tuple(strides), cache.dtype).copy_(cache)


def relaid(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    """The same call in memory where a step too far is a fault, or where 32 bits can not count elements."""
    if rng.random() < 0.1:
        names = {"key_cache", "value_cache", "cache"}
        return {name: far(rng, value) if name in names and value.numel() else value for name, value in call.items()}
    memo: dict[int, Tensor] = {}
    at_start = rng.random() < 0.2
    return tree_map_only(Tensor, lambda t: memo.setdefault(id(t), guarded(t, at_start=at_start)), call)  # type: ignore[no-any-return]


def outcome(function: Any, call: dict[str, Any]) -> tuple[Any, str | None]:
    try:
        return function(**call), None
    except RuntimeError as error:
        return None, str(error).splitlines()[0]


def assert_same_tensors(call: dict[str, Any], after: dict[str, Any]) -> None:
    for now, then in zip(tree_leaves(call), tree_leaves(after), strict=True):
        if isinstance(now, Tensor):
            bits = torch.int8 if now.dtype in TYPES else now.dtype
            torch.testing.assert_close(now.view(bits), then.view(bits), rtol=0, atol=0, equal_nan=True)


def assert_close(actual: Any, expected: Any, bound: float) -> None:
    for one, other in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one.to(other.dtype), other, rtol=bound, atol=bound, equal_nan=True)


def check(seed: int) -> bool:
    """Run one call in three ways; True when it was a valid one."""
    op, call = random_call(seed)
    rng = random.Random(seed)
    before, reference_call, oracle_call = (copy.deepcopy(call) for _ in range(3))
    if not aliases(call) and rng.random() < 0.5:
        call = relaid(rng, call)
    expected, expected_error = outcome(getattr(reference, op), reference_call)
    actual, error = outcome(getattr(pagedkv_ops, op), call)
    assert error == expected_error, f"{op}: raised {error!r}, the reference {expected_error!r}"
    if error:
        assert_same_tensors(call, before)
        return False
    # the types of query and cache both round
    bound = max(TOLERANCE.get(t.dtype, 0.0) for t in tree_leaves(call) if isinstance(t, Tensor))
    assert_same_tensors(call, reference_call)
    assert_close(actual, expected, bound)
    truth = getattr(oracle, op)(**oracle_call)
    assert_same_tensors(call, oracle_call)
    assert_close(actual, truth, bound)
    return True


def aliases(call: dict[str, Any]) -> bool:
    """Whether tensors of the call share a storage."""
    storages = [t.untyped_storage().data_ptr() for t in tree_leaves(call) if isinstance(t, Tensor) and t.numel()]
    return len(set(storages)) < len(storages)


def is_sanitized() -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and "libasan" in maps.read_text()


def run_sanitized(arguments: list[str]) -> int:
    """Build the package with AddressSanitizer beside the ordinary build and run this program on it."""
    root = Path(__file__).parents[2]
    base = root / "build" / "asan"
    build = ["setup.py", "-q", "build", "--build-base", str(base), "--build-lib", str(base / "lib")]
    subprocess.run([sys.executable, *build], cwd=root, env={**os.environ, "PAGEDKV_SANITIZE": "address"}, check=True)
    compiler = os.environ.get("CXX", "g++")
    # the sanitizer takes over __cxa_throw at start-up, so libstdc++ has to be there by then
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    env = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself never frees some of its memory
        "PYTHONPATH": str(root),  # for this package; the current directory, with the sanitized copy, comes before it
    }
    return subprocess.run([sys.executable, "-m", "tests.ops.fuzz", *arguments], cwd=base / "lib", env=env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="time budget")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first call; each further call adds one")
    parser.add_argument("--calls", type=int, default=sys.maxsize, help="stop after so many calls")
    parser.add_argument("--build", action="store_true", help="build with AddressSanitizer and run on that")
    parser.add_argument("--verbose", action="store_true", help="print each seed first: a crash then names its call")
    parser.add_argument("--unsanitized", action="store_true", help="run with an ordinary build of the extension")
    arguments = parser.parse_args()
    if arguments.build:
        return run_sanitized([argument for argument in sys.argv[1:] if argument != "--build"])
    if not (is_sanitized() or arguments.unsanitized):
        parser.error("libasan is not loaded: pass --build or --unsanitized")
    print(f"fuzzing {pagedkv_ops.backends()['cpu']}, sanitized: {is_sanitized()}", flush=True)
    deadline, seed, valid = time.monotonic() + arguments.seconds, arguments.seed, 0
    while time.monotonic() < deadline and seed - arguments.seed < arguments.calls:
        if arguments.verbose:
            print(seed, file=sys.stderr, flush=True)
        try:
            valid += check(seed)
        except BaseException:
            print(f"failed: repeat with --seed {seed} --calls 1", file=sys.stderr, flush=True)
            raise
        seed += 1
    calls = seed - arguments.seed
    print(f"{calls} calls: {valid} valid, {calls - valid} refused, as the reference did")
    return 0 if calls else 1


if __name__ == "__main__":
    sys.exit(main())
