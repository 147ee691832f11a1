"""Rewriting functionalised writes on plain FX graphs, without any compiler."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pagedkv.integrations.in_place import UnsafePagedGraphError, keep_writes_in_place, write_in_place

from .decoder import Decoder, assert_caches_equal, decode, expected, new_caches, step_inputs

FUNCTIONAL = torch.ops.higher_order.auto_functionalized_v2
COPY = torch.ops.aten.copy_.default


def functional_decoder(num_layers: int = 2) -> GraphModule:
    program = torch.export.export(Decoder(num_layers), (*step_inputs(2), new_caches(num_layers)))
    return program.run_decompositions().module()  # type: ignore[return-value]


def copies_back(gm: GraphModule) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=COPY))


def rewrite(gm: GraphModule) -> list[Node]:
    homes: dict[Node, Node] = {node.args[0]: node.args[1] for node in copies_back(gm)}  # type: ignore[misc]
    written = keep_writes_in_place(gm.graph, homes)
    for node in copies_back(gm):
        gm.graph.erase_node(node)
    gm.recompile()
    return written


def node_of(gm: GraphModule, target: Any) -> Node:
    return next(iter(gm.graph.find_nodes(op="call_function", target=target)))


def test_writes_go_into_the_caches_themselves() -> None:
    gm = functional_decoder()
    assert len(rewrite(gm)) == 4
    assert not gm.graph.find_nodes(op="call_function", target=FUNCTIONAL)
    tokens, wanted = expected()
    caches = new_caches(2)
    assert decode(gm, caches=caches) == tokens
    assert_caches_equal(caches, wanted)


def test_writes_survive_the_removal_of_dead_code() -> None:
    gm = functional_decoder(1)
    rewrite(gm)
    for attention in gm.graph.find_nodes(op="call_function", target=torch.ops.pagedkv.paged_attention.default):
        attention.replace_all_uses_with(attention.args[0])
    gm.graph.eliminate_dead_code()
    assert len(gm.graph.find_nodes(op="call_function", target=write_in_place)) == 1


def test_a_late_reader_of_the_old_content_is_refused() -> None:
    gm = functional_decoder(1)
    cache = copies_back(gm)[0].args[0]
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        late = gm.graph.call_function(torch.ops.aten.sum.default, (cache,))
    late.meta["val"] = torch.zeros(())
    output.args = ((*output.args[0], late),)
    with pytest.raises(UnsafePagedGraphError, match=r"reads what .* held before pagedkv\.write_kv"):
        rewrite(gm)


def test_an_early_reader_of_the_old_content_is_put_before_the_write() -> None:
    gm = functional_decoder(1)
    cache, write = copies_back(gm)[0].args[0], node_of(gm, FUNCTIONAL)
    with gm.graph.inserting_before(write):
        early = gm.graph.call_function(torch.ops.aten.sum.default, (cache,))
    early.meta["val"] = torch.zeros(())
    output = gm.graph.output_node()
    output.args = ((*output.args[0], early),)
    rewrite(gm)
    assert early in node_of(gm, write_in_place).all_input_nodes


def test_two_writes_of_the_same_content_are_refused() -> None:
    gm = functional_decoder(1)
    write = node_of(gm, FUNCTIONAL)
    with gm.graph.inserting_after(write):
        twin = gm.graph.call_function(FUNCTIONAL, write.args, dict(write.kwargs))
    twin.meta = dict(write.meta)
    with gm.graph.inserting_after(twin):
        part = gm.graph.call_function(operator.getitem, (twin, 1))
    part.meta["val"] = torch.zeros(())
    output = gm.graph.output_node()
    output.args = ((*output.args[0], part),)
    with pytest.raises(UnsafePagedGraphError, match="both write the same content of caches_0"):
        rewrite(gm)


def test_another_op_that_writes_a_cache_is_refused() -> None:
    gm = functional_decoder(1)
    copy_back = copies_back(gm)[0]
    with gm.graph.inserting_before(copy_back):
        scaled = gm.graph.call_function(torch.ops.aten.mul.Tensor, (copy_back.args[1], 2.0))
    copy_back.args = (copy_back.args[0], scaled)
    with pytest.raises(UnsafePagedGraphError, match="only paged ops may write a cache"):
        rewrite(gm)


def test_a_write_into_anything_else_keeps_its_clone() -> None:
    """Caches that the graph does not hand back: functional semantics, as before."""
    gm = functional_decoder(1)
    for node in copies_back(gm):
        gm.graph.erase_node(node)
    assert keep_writes_in_place(gm.graph, {}) == []
    gm.recompile()
    caches: list[Tensor] = new_caches(1)
    decode(gm, caches=caches, steps=1)
    assert not any(cache.any() for cache in caches)
