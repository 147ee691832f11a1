"""Tensor parallel models: the KV heads of each rank, and one number of blocks for all ranks.

Every rank runs the same steps over its own heads, with a block table of its own; what the ranks must share is how many
blocks there are, because it decides who waits. Requests, their order and torch's seeds must be equal too: the caller
sees to that. Nothing here runs after the set-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import InvalidArgumentError, integer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def kv_heads_of_ranks(num_heads: int, num_kv_heads: int, num_ranks: int) -> list[range]:
    """The KV heads that each rank holds, where rank r has the r-th of ``num_ranks`` equal parts of the query heads.

    More ranks than KV heads hold copies: 8 query heads and 2 KV heads on 4 ranks give heads 0, 0, 1, 1.

    Raises:
        InvalidArgumentError: query heads that KV heads or ranks do not divide, or KV heads of which neither each rank
            has the same number nor each head the same number of ranks.
    """
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("num_ranks", num_ranks)):
        integer(name, value, 1)
    for name, divisor in (("num_kv_heads", num_kv_heads), ("num_ranks", num_ranks)):
        if num_heads % divisor:
            raise InvalidArgumentError(f"num_heads: expected a multiple of {name} ({divisor}), got {num_heads}")
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise InvalidArgumentError(
            f"num_kv_heads: expected a multiple or a divisor of num_ranks ({num_ranks}), got {num_kv_heads}"
        )
    count = max(1, num_kv_heads // num_ranks)
    starts = [rank * num_kv_heads // num_ranks for rank in range(num_ranks)]
    return [range(start, start + count) for start in starts]


def agree_on_num_blocks(num_blocks: int, group: ProcessGroup | None = None, device: torch.device | str = "cpu") -> int:
    """The smallest ``num_blocks`` of all ranks; each rank of the group must call it, at set-up.

    Args:
        num_blocks: blocks that fit on this rank; 0: none, because this rank's set-up has failed.
        group: ranks that share a model; None: all. device: where the group's backend communicates.

    Raises:
        InvalidArgumentError: a rank has 0.
    """
    smallest = torch.tensor([num_blocks], dtype=torch.int64, device=device)
    dist.all_reduce(smallest, dist.ReduceOp.MIN, group)
    agreed = int(smallest)
    if agreed < 1:
        raise InvalidArgumentError("num_blocks: expected blocks on every rank, got none on one, which says why")
    return agreed


def mesh_of(model: torch.nn.Module) -> DeviceMesh | None:
    """The ranks among which a model's weights are divided; None: this process has them whole."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor  # takes a while to import, for what few processes need

    meshes: list[Any] = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not meshes and getattr(model, "_device_mesh", None) is not None:
        meshes = [model._device_mesh]  # transformers before 5.24 keeps plain tensors
    for mesh in meshes:
        if mesh.ndim == 1:
            return mesh  # type: ignore[no-any-return]
        if "tp" in (mesh.mesh_dim_names or ()):
            return mesh["tp"]  # type: ignore[no-any-return]
    return None


def agreed_blocks(model: torch.nn.Module, size: Callable[[], int]) -> int:
    """What ``size`` gives on the rank where it gives least. If it raises on one rank, every rank raises."""
    mesh = mesh_of(model)
    if mesh is None:
        return size()
    group, device = mesh.get_group(), mesh.device_type
    try:
        num_blocks = size()
    except Exception as error:
        try:
            agree_on_num_blocks(0, group, device)
        except InvalidArgumentError:
            raise error from None
        raise
    return agree_on_num_blocks(num_blocks, group, device)


def split_kv_heads(model: torch.nn.Module) -> tuple[int, int] | None:
    """(KV heads, ranks) of the first attention layer whose key projection is cut inside a head; None: there is none."""
    mesh = mesh_of(model)
    if mesh is None:
        return None
    for module in model.modules():
        projection, head_size = getattr(module, "k_proj", None), getattr(module, "head_dim", None)
        if head_size and isinstance(projection, torch.nn.Linear):
            heads = projection.out_features // head_size
            is_divided = local_tensor(projection.weight).shape[0] < projection.out_features
            if is_divided and heads % mesh.size():
                return heads, mesh.size()
    return None


def local_tensor(parameter: Tensor) -> Tensor:
    """The part of a parameter that this process has: a DTensor has no address, and its own count of writes."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
