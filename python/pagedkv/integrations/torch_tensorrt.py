"""Torch-TensorRT: keep paged cache writes in compiled modules, and leave the paged ops to PyTorch.

Torch-TensorRT erases nodes without users and compiles clones of mutated inputs, so that a stock compiled module answers
its first step correctly and has lost the new keys and values afterwards. :func:`install` adds lowering passes that keep
the writes, for ``torch_tensorrt.dynamo.compile`` and for ``torch.compile(backend="tensorrt")``.

Give the caches as inputs where other code uses them too: a buffer that a module writes belongs to the compiled module
alone afterwards, because ``dynamo.compile`` clones it. As inputs it takes contiguous tensors only:
``PagedKVCache(..., layout="NHD")``. Writes of other ops into inputs are lost, as without this module. Views of one pool
are seen in the example inputs alone; give calls of a compiled module no others.

``torch_tensorrt.save`` keeps the writes with its default, ``retrace=True``; to load what it saved, ``pagedkv_ops`` is
enough.
"""

from __future__ import annotations

import copy
import functools
import operator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .aliasing import ranges_meet, share_elements
from .in_place import (
    UnsafePagedGraphError,
    ancestors,
    home_of,
    in_torch,
    is_view,
    keep_writes_in_place,
    paged_op,
    write_in_place,
    written_arguments,
)

__all__ = ["UnsafePagedGraphError", "install", "uninstall"]


# Inputs, counted among the tensors, that the graph being compiled by torch.compile may write; its last outputs are what
# they hold afterwards.
_written_inputs: ContextVar[tuple[int, ...]] = ContextVar("written_inputs", default=())


def install() -> None:
    """Make Torch-TensorRT keep paged writes, in this process; calling it again changes nothing.

    What a compile raises afterwards, besides Torch-TensorRT's own errors:

    * UnsafePagedGraphError: the graph can not keep its writes in place, or ``require_full_compilation`` was asked for a
      graph with paged ops. ``torch.compile`` wraps it in its BackendCompilerFailed.

    ``torch_tensorrt.save(..., retrace=False)`` raises it for a module with paged writes.

    Raises:
        ImportError: torch_tensorrt is missing or can not load.
    """
    hooks = _torch_tensorrt()
    passes = hooks.post_lowering
    if any(_is_ours(lowering_pass) for lowering_pass in passes):
        return
    removal = [lowering_pass.__name__ for lowering_pass in passes].index("remove_num_users_is_0_nodes")
    passes.insert(removal + 1, release_paged_writes)
    passes.insert(removal, hold_paged_writes)
    passes.insert(0, keep_paged_writes)
    hooks.pre_lowering.insert(0, refuse_overlapping_inputs)
    hooks.backends._pretraced_backend = _keeping_writes(hooks.backends._pretraced_backend)
    for module in hooks.exporters:
        module.export = _retracing(module.export)


def uninstall() -> None:
    """Undo :func:`install`; modules that were compiled in between keep their writes."""
    hooks = _torch_tensorrt()
    for passes in (hooks.pre_lowering, hooks.post_lowering):
        passes[:] = [lowering_pass for lowering_pass in passes if not _is_ours(lowering_pass)]
    hooks.backends._pretraced_backend = _stock(hooks.backends._pretraced_backend)
    for module in hooks.exporters:
        module.export = _stock(module.export)


@dataclass(frozen=True)
class _Hooks:
    """What of Torch-TensorRT is changed: lists of passes, and modules whose functions are wrapped."""

    backends: Any
    pre_lowering: list[Any]
    post_lowering: list[Any]
    exporters: tuple[Any, ...]


def _torch_tensorrt() -> _Hooks:
    try:
        from torch_tensorrt import dynamo
        from torch_tensorrt.dynamo import _exporter
        from torch_tensorrt.dynamo.backend import backends
        from torch_tensorrt.dynamo.lowering.passes import _aten_lowering_pass as lowering
    except ImportError as error:
        raise ImportError(
            f"pagedkv: torch_tensorrt can not be imported ({error}); install it with pip install 'pagedkv[tensorrt]'"
        ) from error
    pre_lowering, post_lowering = lowering.ATEN_PRE_LOWERING_PASSES, lowering.ATEN_POST_LOWERING_PASSES
    return _Hooks(backends, pre_lowering.passes, post_lowering.passes, (dynamo, _exporter))


def _stock(function: Any) -> Any:
    return getattr(function, "__wrapped__", function)


def _is_ours(lowering_pass: Any) -> bool:
    return getattr(lowering_pass, "__module__", None) == __name__  # also after a reload of this module


def _keeping_writes(pretraced_backend: Any) -> Any:
    """torch.compile: AOTAutograd sees clones of the inputs and drops writes that nothing reads before any pass runs."""

    @functools.wraps(pretraced_backend)
    def backend(gm: GraphModule, sample_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        extended = GraphModule(gm, copy.deepcopy(gm.graph))
        inputs = _tensor_inputs(extended.graph, "example_value")
        roots = _roots_of_writes(extended.graph)
        written = tuple(i for i, node in enumerate(inputs) if node in roots)
        if not written:
            return pretraced_backend(gm, sample_inputs, *args, **kwargs)
        _protect_copies(extended.graph, [inputs[i] for i in written])
        _set_outputs(extended.graph, (*_outputs(extended.graph), *(inputs[i] for i in written)))
        extended.recompile()
        token = _written_inputs.set(written)
        try:
            compiled = pretraced_backend(extended, sample_inputs, *args, **kwargs)
        finally:
            _written_inputs.reset(token)
        # a failed conversion gives back the graph that it was handed, by then with a clone behind every input
        return gm if compiled is extended else compiled

    return backend


def _protect_copies(graph: Graph, inputs: list[Node]) -> None:
    """The backend takes calls of these methods for identities; a copy of a cache that is written is none."""
    for node in graph.nodes:
        name = "clone" if node.target is torch.ops.aten.clone.default else node.target
        if name in ("clone", "contiguous") and not ancestors(node).isdisjoint(inputs):
            with graph.inserting_before(node):
                copied = graph.call_function(getattr(Tensor, name), node.args, node.kwargs)
            copied.meta = dict(node.meta)
            node.replace_all_uses_with(copied)
            graph.erase_node(node)


def _tensor_inputs(graph: Graph, key: str) -> list[Node]:
    return [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get(key), Tensor)]


def _roots_of_writes(graph: Graph) -> set[Node]:
    """Everything that an argument written by a paged op is computed from."""
    roots: set[Node] = set()
    for node in graph.nodes:
        if paged_op(node):
            written = written_arguments(node)
            roots.update(written, *map(ancestors, written))
    return roots


def _retracing(export: Any) -> Any:
    """The legacy exporter of torch_tensorrt.save takes the graph as it is, and only ops can be serialised."""

    @functools.wraps(export)
    def exporting(gm: GraphModule, *args: Any, use_legacy_exporter: bool | None = False, **kwargs: Any) -> Any:
        if use_legacy_exporter and _calls_ours(gm):
            raise UnsafePagedGraphError("a module with paged writes can only be saved with retrace=True")
        return export(gm, *args, use_legacy_exporter=use_legacy_exporter, **kwargs)

    return exporting


def _calls_ours(gm: GraphModule) -> bool:
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return any(node.target in (write_in_place, in_torch) for graph in graphs for node in graph.nodes)


def refuse_overlapping_inputs(gm: GraphModule, settings: Any) -> GraphModule:
    """dynamo.compile, before the decompositions: they fail on written views of one pool without naming them.

    They take views for separate ones only where address ranges are disjoint.
    """
    inputs = _tensor_inputs(gm.graph, "val")
    written = {_origin(value) for node in gm.graph.nodes if paged_op(node) for value in written_arguments(node)}
    for cache in (node for node in inputs if node in written):
        for other in inputs:
            if other is not cache and ranges_meet(cache.meta["val"], other.meta["val"]):
                raise _overlap(cache, other, "overlap or interleave")
    return gm


def _origin(value: Node) -> Node:
    while is_view(value) or value.target is operator.getitem:
        value = value.all_input_nodes[0]
    return value


def keep_paged_writes(gm: GraphModule, settings: Any) -> GraphModule:
    """First lowering pass: paged ops write into the caches themselves and hand them to every later reader."""
    paged_ops = sorted({name for node in gm.graph.nodes if (name := paged_op(node))})
    if not paged_ops:
        return gm
    if settings.require_full_compilation:
        raise UnsafePagedGraphError(
            f"require_full_compilation=True can not hold: {', '.join(paged_ops)} run in PyTorch; leave the option out"
        )
    homes = _lifted_buffers(gm) | _mutated_inputs(gm.graph) | _inputs_behind_clones(gm.graph)
    for written in keep_writes_in_place(gm.graph, homes):
        _refuse_other_names(written, gm.graph)
    _drop_copies_back(gm.graph)
    gm.recompile()
    return gm


def hold_paged_writes(gm: GraphModule, settings: Any) -> GraphModule:
    """Right before Torch-TensorRT removes nodes without users: the writes are outputs for a moment."""
    _set_outputs(gm.graph, (*_outputs(gm.graph), *_writes(gm.graph)))
    return gm


def release_paged_writes(gm: GraphModule, settings: Any) -> GraphModule:
    """Right after it: other passes would trip over more outputs than the model has, and respect side effects."""
    held = _writes(gm.graph)
    if held:
        _set_outputs(gm.graph, _outputs(gm.graph)[: -len(held)])
        gm.recompile()
    return gm


def _writes(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=write_in_place))


def _outputs(graph: Graph) -> tuple[Any, ...]:
    return tuple(graph.output_node().args[0])  # type: ignore[arg-type]


def _set_outputs(graph: Graph, values: tuple[Any, ...]) -> None:
    graph.output_node().args = (values,)


def _lifted_buffers(gm: GraphModule) -> dict[Node, Node]:
    """Buffers that dynamo.compile made inputs, with their new values, which are the last outputs."""
    names = gm.meta.get("_copyback_mutation_buffers", [])
    stored = dict(zip(names, _outputs(gm.graph)[-len(names) :], strict=True)) if names else {}
    lifted = [node for node in gm.graph.nodes if node.meta.get("_lifted_buffer") in stored]
    return {node: stored[node.meta["_lifted_buffer"]] for node in lifted}


def _mutated_inputs(graph: Graph) -> dict[Node, Node]:
    """torch.export: inputs with the values that it copies back into them at the end."""
    return {node.args[0]: node.args[1] for node in _copies_back(graph)}  # type: ignore[misc]


def _copies_back(graph: Graph) -> list[Node]:
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    return [node for node in copies if node.args[0].op == "placeholder"]


def _drop_copies_back(graph: Graph) -> None:
    for node in _copies_back(graph):
        home, value = node.args
        if isinstance(value, Node) and home_of(value) is home:
            graph.erase_node(node)


def _inputs_behind_clones(graph: Graph) -> dict[Node, Node]:
    """torch.compile: the inputs that may be written, freed of the clones that the backend puts behind every input."""
    written = _written_inputs.get()
    if not written:
        return {}
    inputs = _tensor_inputs(graph, "val")
    # a list first: a clone of the model's own comes behind one of these, and must stay
    clones = [user for node in inputs if len(node.users) == 1 for user in node.users]
    for clone in clones:
        if clone.target is torch.ops.aten.clone.default:
            clone.replace_all_uses_with(clone.all_input_nodes[0])
            graph.erase_node(clone)
    outputs = _outputs(graph)
    _set_outputs(graph, outputs[: -len(written)])
    return {inputs[i]: stored for i, stored in zip(written, outputs[-len(written) :], strict=True)}


def _refuse_other_names(written: Node, graph: Graph) -> None:
    """A reader of the same memory through another input would not be ordered after the write."""
    for other in graph.find_nodes(op="placeholder"):
        if other is not written and other.users and share_elements(written.meta["val"], other.meta.get("val")):
            raise _overlap(written, other, "overlap")


def _overlap(written: Node, other: Node, how: str) -> UnsafePagedGraphError:
    return UnsafePagedGraphError(
        f"inputs {written} and {other} are views of one pool that {how}, and a paged op writes {written}; "
        "pass the pool once and take its views inside the model"
    )
