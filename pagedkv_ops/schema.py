"""The table of op schemas: the one place where an op's name, arguments, mutations and tags are written down."""

from __future__ import annotations

import torch

NAMESPACE = "pagedkv"

TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

_ATTENTION_OPTIONS = (
    "float? scale=None, bool causal=True, int window_left=-1, int window_right=-1, float softcap=0.0, "
    "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, int num_splits=0"
)
_ATTENTION = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, "
    f"Tensor? cu_seqlens_q=None, *, {_ATTENTION_OPTIONS}"
)
# not keyword-only: torch takes an op whose written arguments are that for one with outputs given by the caller
_SCALE_CACHES = "Tensor(c!)? k_scale_cache=None, Tensor(d!)? v_scale_cache=None"

SCHEMAS: dict[str, str] = {
    "write_kv": (
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        f"Tensor? k_scale=None, Tensor? v_scale=None, {_SCALE_CACHES}) -> ()"
    ),
    "paged_attention": f"({_ATTENTION}) -> Tensor",
    "paged_attention_with_lse": f"({_ATTENTION}) -> (Tensor, Tensor)",
    "paged_attention_append": (
        "(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        f"Tensor block_table, Tensor seq_lens, Tensor? cu_seqlens_q=None, {_SCALE_CACHES}, *, {_ATTENTION_OPTIONS}) "
        "-> Tensor"
    ),
    "merge_states": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    "copy_blocks": "(Tensor(a!)[] caches, Tensor block_mapping) -> ()",
    "swap_blocks": "(Tensor src, Tensor(a!) dst, Tensor block_mapping) -> ()",
    "gather_kv": (
        "(Tensor cache, Tensor block_table, Tensor seq_lens, SymInt max_len, *, Tensor? scale=None, "
        "ScalarType? dtype=None) -> Tensor"
    ),
}


def cpp_definitions() -> str:
    """C++ source that defines the ops for programs without Python; tags guide compilers and mean nothing there."""
    definitions = "\n".join(f'  m.def(R"schema({name}{schema})schema");' for name, schema in SCHEMAS.items())
    return (
        "#include <torch/csrc/stable/library.h>\n\n"
        f"STABLE_TORCH_LIBRARY_FRAGMENT({NAMESPACE}, m) {{\n{definitions}\n}}\n"
    )
