"""The arguments of attention, listed once for the checks, the reference and the launchers (``schema``: for torch).

Shapes: T query tokens, B sequences, Hq and Hkv heads, D and Dv head sizes of K and V, N blocks of S tokens, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Attention:
    """One call of paged_attention; construct it as the op is called. What each argument means: its docstring."""

    query: Tensor  # [T, Hq, D]
    key_cache: Tensor  # [N, S, Hkv, D]
    value_cache: Tensor  # [N, S, Hkv, Dv]
    block_table: Tensor  # [B, W]
    seq_lens: Tensor  # [B]
    cu_seqlens_q: Tensor | None = None  # [B+1]
    scale: float | None = None
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # [Hq]
    sinks: Tensor | None = None  # [Hq]
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    num_splits: int = 0
