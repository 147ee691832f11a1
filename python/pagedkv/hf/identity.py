"""What keys and values depend on besides token ids, and who may look at the rows of a batch; seen at little cost."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from ..tensor_parallel import local_tensor

# their hooks divide work among ranks, or record outputs for who asks the model for them
_OWN_HOOKS = ("torch.distributed.", "transformers.")
_OWN_MODULES = {"torch", "transformers", "transformers_modules", "peft", "torchao", "bitsandbytes", "kernels"}
_PLAIN = {int, float, bool, str}
_REGISTERED = torch.nn.Module().__dict__.keys() - {"training"}  # submodules, parameters, hooks: looked at on their own
# of these the attributes are sizes
_SIZED = {torch.nn.Linear, torch.nn.Embedding, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Identity}
_RECORDED = ("output_hidden_states", "output_attentions", "output_router_logits")  # of every column
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN_TENSORS = {Tensor, torch.nn.Parameter}
_SAMPLES = 64  # elements of a weight that the checksum reads
_WHOLE_BYTES = 1 << 25  # of adapters that the checksum reads whole

_WORDS = {
    "tensors": "weights, buffers, modules or forwards of classes that were replaced",
    "writes": "weights or buffers that were written",
    "adapters": "active, disabled or merged adapters",
    "scaling": "scaling of adapters",
    "hooks": "forward hooks, forwards of instances, or dropout",
    "values": "values of weights, written without torch's notice",
    "attributes": "attributes of modules or of the config",
}


@dataclass(frozen=True)
class Identity:
    """What the keys and values of a token depend on besides the tokens up to it.

    Attributes:
        tensors: counts changes of which parameters and buffers there are, and where. writes: of their versions.
        adapters: which are active, disabled and merged, layer by layer. scaling: by what they are multiplied.
        hooks: forward hooks, forwards replaced on instances, active dropout: nobody knows what they do to a token.
        values: checksum of the adapters' parameters, and of samples of all others.
        attributes: digest of the plain attributes of modules, and of the config.
    """

    tensors: int
    writes: int
    adapters: bytes
    scaling: bytes
    hooks: tuple[Any, ...]
    values: int
    attributes: bytes

    @property
    def keys(self) -> list[tuple[str, Any]] | None:
        """What a prefix is keyed by besides its tokens; None: it must neither be hit nor published."""
        if self.hooks:
            return None
        return [(field.name, getattr(self, field.name)) for field in fields(self) if field.name != "hooks"]

    def changes(self, other: Identity, ignored: Sequence[str] = ()) -> str:
        """The names of what differs; empty where nothing does."""
        names = [field.name for field in fields(self) if field.name not in ignored]
        return ", ".join(_WORDS[name] for name in names if getattr(self, name) != getattr(other, name))


class ModelWatch:
    """Tells the :class:`Identity` of a model, from lists of its modules and tensors that are kept.

    Attributes:
        num_surveys: how often the lists were made, because there were other modules or tensors.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.num_surveys = 0
        self._replaced = self._writes = 0
        self._plain: list[Any] = []
        self._digest = b""
        self._volatile: set[str] = set()
        self._versions: list[int]
        self._code: list[Any]
        self._survey()
        self._state: tuple[Any, ...] = self._read_state()
        self._first = self._read_attributes()
        self._current = self._identity(self._checksum(), self._digest_attributes())
        self._inspected = self._state[:2]

    def learn(self) -> None:
        """Leave out attributes that a forward has changed by itself since this object was made."""
        for before, now in zip(self._first, self._read_attributes(), strict=False):
            self._volatile.update(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        self._first = []

    def clear(self) -> None:
        """Let no identity of before come again."""
        self._writes += 1

    def look(self) -> Identity:
        """The identity, but for what only :meth:`inspect` sees; the same object as long as nothing changed.

        50 us for the 272 tensors and 397 modules of SmolLM2-135M, 120 where they are not in its caches.
        """
        if not self._is_as_surveyed():
            self._replaced += 1
            self._survey()
        elif (versions := self._read_versions()) != self._versions:
            self._writes += 1
            self._versions = versions
        if (state := self._read_state()) != self._state:
            self._state = state
            self._current = self._identity(self._current.values, self._digest)
        return self._current

    def inspect(self) -> Identity:
        """The identity, with the values of weights and the attributes of modules.

        1.5 ms for SmolLM2-135M, about 30 ms with 10 MB of adapters on its 210 linear layers.
        """
        is_surveyed = sum(map(len, self._all_dicts)) == self._num_members and self._read_code() == self._code
        if not is_surveyed or self._read_addresses() != self._addresses:
            self._replaced += 1
            self._survey()
        self._num_handles = -1
        self.look()
        values, digest = self._checksum(), self._digest_attributes()
        if values != self._current.values and self._state[:2] == self._inspected:
            self._writes += 1  # since when is not known: what was published since the last time may be of either
            self._state = self._read_state()
        self._inspected = self._state[:2]
        now = self._identity(values, digest)
        if now != self._current:
            self._current = now
        return self._current

    def row_watchers(self) -> str | None:
        """What may look at the rows of a batch: hooks, replaced forwards, foreign modules, recorded outputs."""
        if self.look().hooks or self._read_private():
            return _WORDS["hooks"]
        given = (value for module in self._modules for value in module.__dict__.values() if type(value) is FunctionType)
        function = next((value.__qualname__ for value in given if not _is_known(value)), None)
        return self._foreign or function or self.recorded({})

    def recorded(self, kwargs: dict[str, Any]) -> str | None:
        """What a forward with these arguments gives of every column besides logits: all must be computed for it."""
        config: Any = getattr(self._model, "config", None)
        configs = [] if config is None else [config, config.get_text_config(decoder=True)]
        asked = (name for name in _RECORDED if kwargs.get(name) or any(getattr(c, name, False) for c in configs))
        return next(asked, None)

    def _survey(self) -> None:
        """Make the lists anew, for a model whose modules, parameters or buffers are others."""
        self.num_surveys += 1
        self._modules = list(self._model.modules())
        self._all_dicts: list[dict[str, Any]] = [
            members for m in self._modules for members in (m._modules, m._parameters, m._buffers)
        ]
        members = [*chain.from_iterable(map(dict.values, self._all_dicts))]
        self._num_members = len(members)
        self._exact_dicts = [d for d in self._all_dicts if not all(map(_is_told_apart, d.values()))]
        self._exact_members = self._read_exact_members()
        exact = {id(d) for d in self._exact_dicts}
        self._dicts = [d for d in self._all_dicts if d and id(d) not in exact]
        self._copies = [d.copy() for d in self._dicts]
        tensors = [member for member in members if isinstance(member, Tensor)]
        self._tensors = [part for tensor in tensors for part in _parts(tensor)]
        whole = {id(tensor): tensor for tensor in (*self._tensors, *tensors)}  # a DTensor counts writes of its own
        self._counted = [tensor for tensor in whole.values() if not tensor.is_inference()]
        self._addresses, self._versions = self._read_addresses(), self._read_versions()
        self._adapters = [m for m in self._modules if isinstance(getattr(type(m), "disable_adapters", None), property)]
        self._adapter_states = [layer.__dict__ for layer in self._adapters]
        self._hook_dicts = hook_dicts(self._modules)
        self._num_handles = -1
        # attributes of each module, and whether they may hold tensors that its forward uses
        self._attributes = [(m.__dict__, not _is_known(type(m))) for m in self._modules if type(m) not in _SIZED]
        self._kinds: list[Any] = list(dict.fromkeys(map(type, self._modules)))
        self._code = self._read_code()
        self._droppers = [m for m in self._modules if any(map(_is_rate, m.__dict__.items()))]
        strange = (kind for kind in self._kinds if not (_is_known(kind) and _is_known(kind.forward)))
        self._foreign = next((kind.__name__ for kind in strange), None)
        self._samples: list[Tensor] | None = None

    def _identity(self, values: int, digest: bytes) -> Identity:
        replaced, writes, (adapters, scaling), hooks = self._state
        private = hooks + self._read_private()
        return Identity(replaced, writes, _digest(adapters), _digest(scaling), private, values, digest)

    def _read_state(self) -> tuple[int, int, tuple[list[Any], list[Any]], tuple[Any, ...]]:
        return self._replaced, self._writes, self._read_adapters(), self._read_hooks()

    def _is_as_surveyed(self) -> bool:
        """Whether modules, parameters and buffers are the same objects. Comparing dicts does not touch what is in them,
        as long as that is the same: a third of the time that reading them takes."""
        try:
            are_same = self._dicts == self._copies
        except Exception:  # of comparing a tensor with another one
            are_same = False
        return are_same and self._are_exact()

    def _are_exact(self) -> bool:
        members = self._read_exact_members()
        return len(members) == len(self._exact_members) and all(map(is_, members, self._exact_members))

    def _read_exact_members(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._exact_dicts))]

    def _read_code(self) -> list[Any]:
        """Classes of modules, but for the model's own, which patch exchanges, and their forwards."""
        return [*map(type, self._modules[1:]), *(kind.forward for kind in self._kinds)]

    def _read_addresses(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._tensors)]

    def _read_versions(self) -> list[int]:
        return [*map(attrgetter("_version"), self._counted)]

    def _read_adapters(self) -> tuple[list[Any], list[Any]]:
        names: list[Any] = []
        scaling: list[Any] = []
        for state in self._adapter_states:
            names.append(state.get("_disable_adapters"))
            active, merged = state.get("_active_adapter"), state.get("merged_adapters")
            names += active if type(active) is list else [active]
            if merged:
                names.append(str(merged))
            scaling += [v if type(v) is float else _number(v) for v in state.get("scaling", {}).values()]
        return names, scaling

    def _read_hooks(self) -> tuple[Any, ...]:
        # each registration takes a number; without a new one there are none where there were none
        if self._num_handles == RemovableHandle.next_id:
            return ()
        if not any(self._hook_dicts):
            self._num_handles = RemovableHandle.next_id
            return ()
        self._num_handles = -1
        return tuple(number for hooks in self._hook_dicts for number, hook in hooks.items() if not _is_own(hook))

    def _read_private(self) -> tuple[Any, ...]:
        """Forwards that were replaced on instances, and dropout where it is on."""
        forwards = [
            m.__dict__["forward"] for m in self._modules if "forward" in m.__dict__ and not _is_class_forward(m)
        ]
        return (*forwards, *(["dropout"] if any(m.training for m in self._droppers) else []))

    def _read_attributes(self) -> list[dict[str, Any]]:
        return [_described(state) if is_foreign else _plain_items(state) for state, is_foreign in self._attributes]

    def _digest_attributes(self) -> bytes:
        volatile = self._volatile
        plain: list[Any] = [
            item for state in self._read_attributes() for item in state.items() if item[0] not in volatile
        ]
        config: Any = getattr(self._model, "config", None)
        plain.append(("config", repr(config.to_dict()) if hasattr(config, "to_dict") else None))
        if plain != self._plain:
            self._plain, self._digest = plain, _digest(plain)
        return self._digest

    def _checksum(self) -> int:
        if self._samples is None:
            self._samples = list(self._sample())
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for sample in self._samples:
            groups.setdefault((sample.device, sample.dtype), []).append(sample)
        result = 0
        for samples in groups.values():
            result = zlib.crc32(torch.cat(samples).cpu().numpy().data, result)
        return result

    def _sample(self) -> Iterator[Tensor]:
        """Views of the elements that the checksum reads, as integers: adapters whole, as far as they are small."""
        named = [chain(layer.named_parameters(), layer.named_buffers()) for layer in self._adapters]
        tensors = [tensor for name, tensor in chain.from_iterable(named) if "base_layer." not in name]
        own = [part for tensor in tensors for part in _parts(tensor)]
        is_small = sum(part.nbytes for part in own) <= _WHOLE_BYTES
        whole = {id(part) for part in own} if is_small else set()
        for tensor in self._tensors:
            bits = _bits(tensor)
            if bits is not None:
                # an odd step, so that samples of a matrix do not all lie in one column
                step = 1 if id(tensor) in whole else max(1, len(bits) // _SAMPLES) | 1
                yield bits[::step]


def hook_dicts(modules: Iterable[torch.nn.Module]) -> list[dict[int, Any]]:
    """The forward hooks of modules and those of all modules, by their numbers."""
    own = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    return [*own, global_hooks._global_forward_hooks, global_hooks._global_forward_pre_hooks]


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a tensor's elements: the local one of a DTensor, the parts of a quantised one."""
    local: Any = local_tensor(tensor)
    if hasattr(type(local), "__tensor_flatten__"):
        names, _ = local.__tensor_flatten__()
        return [part for name in names for part in _parts(getattr(local, name))]
    return [local]


def _bits(tensor: Tensor) -> Tensor | None:
    """A view [elements] as integers; None where there is none."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta" or not tensor.numel():
        return None
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if span != tensor.numel():
        return None
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(_INTEGERS[tensor.element_size()]) if tensor.element_size() in _INTEGERS else None


def _is_told_apart(member: Any) -> bool:
    """Comparing it with another object by ``==`` says no, or raises: not tensors of one element, and not DTensors."""
    return not isinstance(member, Tensor) or (type(member) in _PLAIN_TENSORS and member.numel() != 1)


def _plain_items(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if type(value) in _PLAIN}


def _described(value: Any, depth: int = 3) -> Any:
    """Plain values, and tensors by address and writes, also in lists and dicts of a module that is not of a library."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, 0 if value.is_inference() else value._version
    if callable(value) or not depth:
        return id(value)
    if isinstance(value, dict):
        return {name: _described(item, depth - 1) for name, item in value.items() if name not in _REGISTERED}
    if isinstance(value, list | tuple):
        return [_described(item, depth - 1) for item in value]
    return type(value).__name__


def _digest(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).digest()


def _number(value: Any) -> Any:
    """PEFT keeps scalings as tensors where adapters shall be hot-swapped under torch.compile."""
    return (value.data_ptr(), value._version) if isinstance(value, Tensor) else value


def _is_rate(attribute: tuple[str, Any]) -> bool:
    name, value = attribute
    return type(value) is float and value > 0 and (name == "p" or "dropout" in name)


def _is_own(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a functools.partial
    return str(getattr(hook, "__module__", "")).startswith(_OWN_HOOKS)


def _is_class_forward(module: torch.nn.Module) -> bool:
    """A forward kept on the instance that is the class's own, or that compiled."""
    forward = module.__dict__["forward"]
    forward = getattr(forward, "_torchdynamo_orig_callable", forward)
    return getattr(forward, "__func__", None) is type(module).forward


def _is_known(code: Any) -> bool:
    return str(code.__module__).partition(".")[0] in _OWN_MODULES
