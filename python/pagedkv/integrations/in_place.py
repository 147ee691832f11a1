"""Turn functionalised paged writes of an FX graph back into writes in place, for compilers other than Inductor.

``torch.export`` and AOTAutograd replace ``write_kv(..., key_cache)`` by ``new = auto_functionalized_v2(write_kv, ...,
key_cache)``, let later readers use ``new`` and copy it back at the end. Inductor undoes that; a compiler that executes
it as it stands writes into a clone, and one that also drops the copy back loses the write when the step ends.
:func:`keep_writes_in_place` undoes it on the graph itself: the write returns the caches it wrote, so that every later
reader depends on it by data and no scheduler can move one across the other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2_dense
from torch.fx import Graph, Node

_FUNCTIONAL_WRITE = torch.ops.higher_order.auto_functionalized_v2
_COPY_BACK = torch.ops.aten.copy_.default
_RESHAPE_COPY = torch.ops.aten._reshape_copy.default  # what decompositions make of a view


class UnsafePagedGraphError(Exception):
    """A graph whose paged writes can not be kept in place.

    Not a RuntimeError: the tensorrt backend of torch.compile swallows those and runs the graph uncompiled.
    """


def write_in_place(op: Any, cloned_bases: tuple[int, ...], after: list[Any], **kwargs: Any) -> Any:
    """``auto_functionalized_v2(op, **kwargs)`` that clones only the named bases; returns (outputs..., *bases).

    ``after`` is unused: values that read the old content of a base, and therefore must exist first.
    """
    return auto_functionalized_v2_dense(op, cloned_bases, **kwargs)


def in_torch(op: Any, *args: Any, **kwargs: Any) -> Any:
    """``op(*args, **kwargs)`` behind a name that no converter knows.

    A view of a cache must stay a view: computed by an engine it would be a copy of the cache in every step.
    """
    return op(*args, **kwargs)


torch.fx.node.has_side_effect(write_in_place)
_WRITES = (_FUNCTIONAL_WRITE, write_in_place)


def paged_op(node: Node) -> str | None:
    """The name of the paged op that ``node`` calls, functionalised or not, or None."""
    target = node.args[0] if node.target in _WRITES else node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = target.default
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "pagedkv":
        return str(target)
    return None


def written_arguments(node: Node) -> list[Node]:
    """The tensors that a call of a paged op writes; none once it is functionalised."""
    if node.target in _WRITES:
        return []
    schema = getattr(node.target, "default", node.target)._schema  # type: ignore[union-attr]
    values = {**dict(zip([a.name for a in schema.arguments], node.args, strict=False)), **node.kwargs}
    written = [values.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    flat = [item for value in written for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [item for item in flat if isinstance(item, Node)]


def keep_writes_in_place(graph: Graph, homes: dict[Node, Node]) -> list[Node]:
    """Rewrite the functionalised paged writes of ``graph`` whose caches outlive the step.

    Args:
        homes: the graph's inputs that the caller wants updated, each with the value that the graph stores back into
            it. A write into anything else keeps writing into a clone.

    Returns:
        the inputs among ``homes`` that paged ops write.

    Raises:
        UnsafePagedGraphError: a cache is written by other ops too, two writes start from the same content, or
            something reads the old content after the write.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if node.target is _FUNCTIONAL_WRITE and paged_op(node)]
    latest: dict[Node, tuple[Node, int]] = {}
    new_nodes: set[Node] = set()
    for write in writes:
        homes_by_base = {i: home_of(base) for i, base in enumerate(_bases(write))}
        kept = {i: home for i, home in homes_by_base.items() if home in homes}
        after = [reader for i in kept for reader in _pending_readers(_bases(write)[i], write, order)]
        new = _replace(graph, write, tuple(i for i in homes_by_base if i not in kept), after)
        order[new] = order[write]
        latest |= {home: (new, _num_outputs(new) + i) for i, home in kept.items()}
        new_nodes.add(new)
    _check_stored_values(homes, latest, new_nodes)
    _keep_views_in_torch(graph)
    return list(latest)


def _bases(write: Node) -> list[Node]:
    return list(write.kwargs["_all_bases"])  # type: ignore[arg-type]


def _num_outputs(write: Node) -> int:
    return max(1, len(write.args[0]._schema.returns))  # type: ignore[union-attr]


def home_of(value: Node) -> Node:
    """The tensor whose memory ``value`` is: back through the writes that returned it."""
    while value.target is operator.getitem and value.all_input_nodes[0].target in _WRITES:
        write, position = value.all_input_nodes[0], int(value.args[1])  # type: ignore[arg-type]
        if position < _num_outputs(write):
            break
        value = _bases(write)[position - _num_outputs(write)]
    return value


def is_view(node: Node) -> bool:
    target = node.target
    return target is _RESHAPE_COPY or (isinstance(target, torch._ops.OpOverload) and target.is_view)


def _same_content(value: Node) -> list[Node]:
    """All nodes that take the same part of a tuple as ``value``."""
    if value.target is not operator.getitem:
        return [value]
    return [user for user in value.all_input_nodes[0].users if user.args == value.args]


def _readers(value: Node) -> Iterator[Node]:
    """Nodes whose value depends on the content of ``value``, through views and the parts of tuples."""
    for user in value.users:
        result = user.meta.get("val")
        if is_view(user) or (isinstance(result, (tuple, list)) and user.target not in _WRITES):
            yield from _readers(user)
        elif not isinstance(result, (int, torch.SymInt)):  # sizes and strides are no content
            yield user


def _pending_readers(base: Node, write: Node, order: dict[Node, int]) -> list[Node]:
    """The readers of the content that ``write`` replaces which it does not depend on yet."""
    inputs = ancestors(write)
    pending = []
    for reader in (reader for value in _same_content(base) for reader in _readers(value)):
        if reader is write or reader in inputs or reader.target is _COPY_BACK or _is_dead(reader):
            continue
        if reader.target in _WRITES and base in _bases(reader):
            raise UnsafePagedGraphError(
                f"{paged_op(write)} and {paged_op(reader)} both write the same content of {base}"
            )
        if order.get(reader, -1) > order[write]:
            raise UnsafePagedGraphError(
                f"{reader} reads what {base} held before {paged_op(write)} wrote into it, but runs after it; "
                "clone the cache first, or read it before the write"
            )
        pending.append(reader)
    return pending


def _is_dead(node: Node) -> bool:
    # a module without users: torch.export's guards, which take every input and look at sizes alone
    return not node.users and (node.op == "call_module" or not node.is_impure())


def ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    stack = [node]
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in found]
        found.update(new)
        stack += new
    return found


def _replace(graph: Graph, write: Node, cloned: tuple[int, ...], after: list[Node]) -> Node:
    with graph.inserting_before(write):
        new = graph.call_function(write_in_place, (write.args[0], cloned, after), dict(write.kwargs))
    new.meta = dict(write.meta)
    write.replace_all_uses_with(new)
    graph.erase_node(write)
    return new


def _check_stored_values(homes: dict[Node, Node], latest: dict[Node, tuple[Node, int]], writes: set[Node]) -> None:
    for home, stored in homes.items():
        if stored.target is operator.getitem and stored.args == latest.get(home):
            continue
        if home in latest or ({stored} | ancestors(stored)) & writes:
            raise UnsafePagedGraphError(
                f"{home} is written by a paged op and by something else in one graph; only paged ops may write a cache"
            )


def _keep_views_in_torch(graph: Graph) -> None:
    for node in graph.nodes:
        if paged_op(node) and node.target not in _WRITES:
            for view in node.all_input_nodes:
                if is_view(view) and _view_root(view).op in ("placeholder", "get_attr"):
                    node.replace_input_with(view, _view_in_torch(graph, view))


def _view_root(value: Node) -> Node:
    while is_view(value):
        value = home_of(value.all_input_nodes[0])
    return home_of(value)


def _view_in_torch(graph: Graph, view: Node) -> Node:
    base = view.all_input_nodes[0]
    source = _view_in_torch(graph, base) if is_view(base) else base
    op: Any = torch.ops.aten.reshape.default if view.target is _RESHAPE_COPY else view.target
    with graph.inserting_before(view):
        new = graph.call_function(in_torch, (op, *view.args), dict(view.kwargs))
    new.replace_input_with(base, source)
    new.meta = dict(view.meta)
    return new
