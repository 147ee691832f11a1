"""``patch``, ``unpatch`` and ``patched``: a model's ``generate`` on blocks, undone without a trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..errors import boolean, refused
from ..tensor_parallel import agreed_blocks
from . import reuse
from .cache import group_windows
from .compiling import CompiledStep, can_capture
from .handle import ATTRIBUTE, Patch, placement
from .kv_pool import Pool, sized
from .methods import patched_class
from .pool_size import check_settings
from .probe import Probe, checked_attention, evaluation
from .refusals import UnsupportedModelError, base_model, check_inputs_are_ids, check_model, failed, refuse

Model = TypeVar("Model")
# of each group of layers; a larger block would need its memory before it is known how much
_PROBE_BLOCKS, _PROBE_BLOCK_SIZE = 32, 16


def _target(model: Any) -> PreTrainedModel:
    """The transformers model inside a compiled module or an adapter model."""
    model = base_model(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers PreTrainedModel, got {type(model).__name__}")
    return model


def patch(
    model: Model,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    memory: int | float | None = None,
    kv_dtype: torch.dtype | str | None = None,
    prefix_caching: bool = False,
    compile: bool | dict[str, Any] = False,
) -> Model:
    """Let ``model.generate`` keep its KV cache in blocks; the tokens stay those of the unpatched model.

    A short generation with the model's own cache and with blocks is compared, so that a model which blocks can not
    serve is refused here. Patching again with the same settings does nothing. Calls from several threads take turns.

    Args:
        model: a transformers causal language model, also inside a PEFT or a compiled module.
        block_size: tokens per block.
        num_blocks: blocks of the model's pool, the null block included; None: from ``memory``. Not both.
        memory: bytes of the pool, or the fraction (0..1) of what is free; None: on CUDA 0.8 of what is free now, on CPU
            half of it, which is reserved and touched only as blocks are used; at most 65,536 blocks.
        kv_dtype: type of the stored keys and values: a float type of torch, or "int8", "fp8_e4m3" or "fp8_e5m2", which
            hold twice the tokens of 16 bits with a scale for each token and head, and change logits by their rounding;
            None: the type the model computes them in.
        prefix_caching: prompts that begin like an earlier one reuse its blocks (:func:`clear_prefix_cache`).
        compile: run decode steps through ``torch.compile``, with these options if it is a dict. True on CUDA captures
            them, too: from the second of a batch size on a step is one replay. True on CPU packs the weights, which
            takes their memory once more; changed ones are packed anew, but for writes through ``.data`` into a few
            elements: unpatch the model before those.

    Returns:
        The same model.

    Raises:
        TypeError: the model is none of transformers.
        UnsupportedModelError: blocks can not serve the model, which is left as it was.
        ValueError: the model is patched with other settings, or a setting is out of its range.

    Example:
        >>> _ = pagedkv.patch(model, num_blocks=64)
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 7])
        >>> _ = pagedkv.unpatch(model)
    """
    block_size, num_blocks, kv_dtype = check_settings(block_size, num_blocks, memory, kv_dtype)
    options = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "memory": memory,
        "kv_dtype": kv_dtype,
        "prefix_caching": boolean("prefix_caching", prefix_caching),
        "compile": _compile_options(compile),
    }
    target = _target(model)
    check_inputs_are_ids(model)
    known: Patch | None = target.__dict__.get(ATTRIBUTE)
    if known is None:
        check_model(target)
        _install(target, Patch(target, options))
    elif known.options != options:
        raise ValueError(f"pagedkv: the model is patched with {known.options}; unpatch it first to use {options}")
    return model


def _compile_options(compile: Any) -> bool | dict[str, Any]:
    known = inspect.signature(torch.compile).parameters.keys() - {"model"}
    if isinstance(compile, bool) or (isinstance(compile, dict) and compile.keys() <= known):
        return compile
    raise refused("compile", "a bool or a dict of options of torch.compile", compile)


def _install(model: PreTrainedModel, handle: Patch) -> None:
    """Patch, or raise and leave the model as it was."""
    model.__dict__[ATTRIBUTE] = handle
    model.__class__ = patched_class(type(model))  # type: ignore[arg-type]
    try:
        _probe(model, handle)
        handle.watch.learn()
        _size_pool(model, handle)
        compile = handle.options["compile"]
        if compile:
            options = compile if isinstance(compile, dict) else None
            handle.compiled = CompiledStep(model, handle.original_class, handle.watch, options)
            if options is None and can_capture(model) and reuse.dependence(model, handle.new_cache(model)) is None:
                handle.compiled.capture(handle.cache_name, handle.pool)
    except BaseException:
        unpatch(model)
        raise


def _probe(model: PreTrainedModel, handle: Patch) -> None:
    """Run both ways, compare, and learn each layer's mode."""
    sizes = _PROBE_BLOCKS * len(group_windows(model.config)), min(handle.options["block_size"], _PROBE_BLOCK_SIZE)
    handle.set_pool(model, *sizes, prefix_caching=False)
    with evaluation(model):
        generate = partial(handle.original_class.generate, model)
        probe = Probe(model, generate, handle.cache_name, handle.options["kv_dtype"])
        try:
            _probe_paged(model, handle, probe)
        except Exception:
            if not handle.switches:
                raise
            # it does something to its masks or keys that the attention function can not see: leave its attention alone
            handle.switches = False
            handle.set_pool(model, *sizes, prefix_caching=False)
            _probe_paged(model, handle, probe)


def _probe_paged(model: PreTrainedModel, handle: Patch, probe: Probe) -> None:
    cache = handle.new_cache(model)
    try:
        with checked_attention(model, cache.state.layers):
            paged = probe.run(model.generate, cache)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise failed(model, error, "its short generation fails") from error
    if not any(layer.spec for layer in cache.state.layers):
        raise refuse(model, "its forward does not write to the cache it is given")
    probe.check_generated(paged)
    handle.layers = [(layer.mode, layer.spec) for layer in cache.state.layers]
    handle.placement = placement(model)
    cache.reset()


def _size_pool(model: PreTrainedModel, handle: Patch) -> None:
    options = handle.options
    sizes = options["num_blocks"], options["memory"], options["block_size"]
    device = model.get_input_embeddings().weight.device
    num_blocks = agreed_blocks(model, lambda: sized(handle.pool, *sizes, device))
    caching = options["prefix_caching"] and reuse.allowed(model, handle.new_cache(model))
    handle.set_pool(model, num_blocks, options["block_size"], caching)
    handle.pool.layer_modes = handle.new_cache(model).layer_modes


def unpatch(model: Model) -> Model:
    """Give a model back its own ``generate`` and attention. Caches that it returned can not be continued after it.

    Args:
        model: a model, also inside a PEFT or a compiled module; nothing happens where it is not patched.

    Returns:
        The same model.

    Raises:
        TypeError: the model is none of transformers.

    Example:
        >>> pagedkv.unpatch(pagedkv.patch(model, num_blocks=64)) is model
        True
    """
    target = _target(model)
    handle: Patch | None = target.__dict__.pop(ATTRIBUTE, None)
    if handle is not None:
        if handle.compiled is not None:
            handle.compiled.clear()
        target.__class__ = handle.original_class
    return model


@contextmanager
def patched(model: Model, **options: Any) -> Iterator[Model]:
    """Patch on entry, and unpatch on exit if the model was not patched before.

    Args:
        model, options: as for :func:`patch`.

    Raises:
        TypeError, UnsupportedModelError, ValueError: as :func:`patch` does.

    Example:
        >>> with pagedkv.patched(model, num_blocks=64):
        ...     tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
        >>> bool((tokens == model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)).all())
        True
    """
    was_patched = ATTRIBUTE in _target(model).__dict__
    try:
        yield patch(model, **options)
    finally:
        if not was_patched:
            unpatch(model)


def pool(model: Any) -> Pool:
    """Give the pool of a patched model.

    Args:
        model: a patched model, also inside a PEFT or a compiled module.

    Raises:
        ValueError: the model is not patched.

    Example:
        >>> with pagedkv.patched(model, num_blocks=64):
        ...     pagedkv.pool(model).manager.num_free_blocks
        63
    """
    handle: Patch | None = _target(model).__dict__.get(ATTRIBUTE)
    if handle is None:
        raise ValueError(f"pagedkv: {type(_target(model)).__name__} is not patched")
    return handle.pool


def clear_prefix_cache(model: Any) -> None:
    """Forget the prefixes of a patched model. Needed after changes that do not show in its parameters.

    Args:
        model: a patched model, also inside a PEFT or a compiled module.

    Raises:
        ValueError: the model is not patched.

    Example:
        >>> with pagedkv.patched(model, num_blocks=64, prefix_caching=True):
        ...     pagedkv.clear_prefix_cache(model)
    """
    pool(model)
    _target(model).__dict__[ATTRIBUTE].watch.clear()


def layer_modes(model: Any) -> list[str]:
    """Tell what each layer of a patched model got.

    Args:
        model: a patched model, also inside a PEFT or a compiled module.

    Returns:
        Per layer of the cache: ``"paged"`` (attention reads the blocks), ``"gathered"`` (keys and values are kept in
        blocks and gathered for the model's own attention), or the name of the library's own layer class.

    Raises:
        ValueError: the model is not patched.

    Example:
        >>> with pagedkv.patched(model, num_blocks=64):
        ...     pagedkv.layer_modes(model)
        ['paged', 'paged']
    """
    return list(pool(model).layer_modes)
