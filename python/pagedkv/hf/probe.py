"""The acceptance test of a model: its logits over blocks against its own, as far apart as rounding moves its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import NAME, paged_attention
from .paged_layers import INDICES, PAGED, PagedLayer
from .refusals import failed, refuse
from .tags import TAG

NEW_TOKENS = 3
# Measured: logits over blocks are at most 2.5 times as far from the model's own as those move by themselves.
_MULTIPLE = 4
_LEAST, _LARGEST = 1e-4, 0.5  # no attention is wrong by so little; logits of another model are 1.4 away


class Probe:
    """What a model generates with its own cache, and how far other logits may be from it.

    The limit is the model's own sensitivity: how far its logits move where its embeddings move by a rounding, and where
    a row is computed alone instead of in a batch. Activations that are quantised by what else is in the batch move them
    by percents, float32 by millionths.

    Args:
        model: the model, in evaluation mode.
        generate: its own ``generate``.
        cache_name: of the cache argument of its forward.
        kv_dtype: of the stored keys and values; None: the type they come in.

    Attributes:
        prompts: tokens of two rows; for ``generate`` the second is padded on the left.
        tokens: what the model adds to each row.
        limit: how far, relative to their norm, logits may be from the model's own.

    Raises:
        UnsupportedModelError: the model does not generate from token ids alone.
    """

    def __init__(
        self, model: PreTrainedModel, generate: Callable[..., Any], cache_name: str, kv_dtype: torch.dtype | None
    ) -> None:
        self._model, self._cache_name = model, cache_name
        self._inputs = _inputs(model)
        ids, mask = self._inputs.values()
        self.prompts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
        types = [dtype for dtype in (model.dtype, kv_dtype) if dtype is not None]
        rounding = max(2 / 127 if dtype == torch.int8 else torch.finfo(dtype).eps for dtype in types)
        try:
            own = self.run(generate)
            alone = self.run(generate, rows=1)
            with _rounded_embeddings(model, rounding):
                moved = self.run(generate)
        except Exception as error:
            raise failed(model, error, "it does not generate from token ids alone") from error
        self.tokens: list[list[int]] = own.sequences[:, ids.shape[1] :].tolist()
        self._logits = own.logits  # per new token [2, vocabulary]
        self.sensitivity = max(
            relative_difference(own.logits[0][:1], alone.logits[0]),
            relative_difference(own.logits[0], moved.logits[0]),
        )
        self.limit = min(_LARGEST, max(_LEAST, _MULTIPLE * self.sensitivity))

    def run(self, generate: Callable[..., Any], cache: Any = None, rows: int = 2) -> Any:
        """What ``generate`` gives for the inputs, whatever the model's generation config asks for.

        Args:
            generate: the model's, or that of its patched class.
            cache: to be filled; None: one of the library's own.
            rows: so many of the inputs.
        """
        given, self._model.generation_config = self._model.generation_config, _generation_config()
        cache = DynamicCache(config=self._model.config) if cache is None else cache
        try:
            inputs = {name: tensor[:rows] for name, tensor in self._inputs.items()}
            return generate(**inputs, generation_config=_generation_config(), **{self._cache_name: cache})
        finally:
            self._model.generation_config = given

    def check(self, step: int, logits: Tensor, where: str) -> None:
        """Compare logits over blocks with the model's own.

        Args:
            step: new tokens before these.
            logits: [2, vocabulary].
            where: for the message.

        Raises:
            UnsupportedModelError: they differ by more than the limit.
        """
        self.check_pair(self._logits[step], logits, where)

    def check_pair(self, expected: Tensor, got: Tensor, where: str, limit: float = 0.0) -> None:
        """:meth:`check` for any logits, with a limit that may be larger."""
        difference, limit = relative_difference(expected, got), max(self.limit, limit)
        if not difference <= limit:
            reason = f"its logits {where} differ from its own by {difference:.1e} (relative), more than {limit:.1e}"
            raise refuse(self._model, reason)

    def check_generated(self, output: Any) -> None:
        """:meth:`check` for what ``generate`` gave for the same inputs, up to where it chose another token."""
        for step, logits in enumerate(output.logits):
            self.check(step, logits, f"at step {step}")
            if not torch.equal(logits.argmax(-1), self._logits[step].argmax(-1)):
                return


def relative_difference(expected: Tensor, got: Tensor) -> float:
    expected, got = expected.double(), got.double()
    return float((expected - got).norm() / expected.norm().clamp_min(1e-9))


@contextmanager
def checked_attention(model: PreTrainedModel, layers: Sequence[Any]) -> Iterator[None]:
    """Within it decode steps of these layers of a cache compare each layer's output with the model's own attention.

    It sees what logits cannot show where rounding moves them by more than a wrong scale or softcap does: in 16 bits,
    and with activations in 8 bits.

    Raises:
        UnsupportedModelError: inside, in the forward; names the layer's class.
    """

    def attend(module: torch.nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = paged_attention(module, query, key, *args, **kwargs)
        layer: Any = getattr(key, TAG, None)
        if not any(layer is known for known in layers) or layer.mode != PAGED:
            return output
        indices = {name: kwargs.pop(name) for name in INDICES if name in kwargs}
        table, lengths, offsets = layer.reads(indices)
        if offsets is None:
            expected = _own_attention(module, layer, query, table, lengths, **kwargs)
            got = output[0].flatten(0, 1)[lengths > 0]  # [S, Hq, Dv]
            difference = 0.0 if expected is None else relative_difference(expected, got)
            if not difference <= max(_LEAST, torch.finfo(query.dtype).eps):  # measured: a quarter of it in 16 bits
                text = f"over blocks differs from its own attention by {difference:.1e} (relative)"
                raise refuse(model, f"{type(module).__name__} {text}")
        return output

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(NAME, paged_attention)


def _own_attention(
    module: torch.nn.Module, layer: PagedLayer, query: Tensor, table: Tensor, lengths: Tensor, **kwargs: Any
) -> Tensor | None:
    """[S, Hq, Dv] of the last token of each row in float32, by the model's own function; None: it has none."""
    attend = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    columns = torch.arange(int(lengths.max()), device=lengths.device)
    first = 0 if layer.sliding_window is None else lengths[:, None] - layer.sliding_window
    seen = (columns < lengths[:, None]) & (columns >= first)  # [S, columns]
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    keys, values = (
        tokens.float().transpose(1, 2) for tokens in layer.gather(table, lengths, len(columns))
    )  # [S, Hkv, columns, D]
    queries = query.transpose(1, 2).flatten(0, 1)[:, :, None].float()  # [S, Hq, 1, D]
    try:
        output: Tensor = attend(module, queries, keys, values, mask, **kwargs)[0]  # type: ignore[misc]
    except Exception:  # it wants other arguments: the logits judge alone
        return None
    return output[:, 0][lengths > 0]


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """No dropout inside; every module's mode comes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _rounded_embeddings(model: PreTrainedModel, rounding: float) -> Iterator[None]:
    """Within it the token embeddings move by a rounding: positive elements up, negative ones too."""

    def move(module: Any, args: Any, output: Tensor) -> Tensor:
        return output + rounding * output.abs()  # a factor for all elements would be lost in the first norm

    hook = model.get_input_embeddings().register_forward_hook(move)
    try:
        yield
    finally:
        hook.remove()


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Two rows of a few tokens, one of them padded on the left."""
    vocabulary = model.get_input_embeddings().num_embeddings
    device = model.get_input_embeddings().weight.device
    ids = (torch.arange(12, device=device).reshape(2, 6) * 7 + 5) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generation_config() -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,
    )
