"""Every causal language model family of the installed transformers, built tiny and run both ways.

python tests/hf/families.py [family ...]     prints one line per family
python tests/hf/families.py --write          runs all and writes docs/FAMILIES.md
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import pagedkv
from pagedkv import InvalidArgumentError, layer_modes
from pagedkv.hf import UnsupportedModelError
from pagedkv.hf.cache import estimated_block_bytes

TABLE = Path(__file__).parents[2] / "docs" / "FAMILIES.md"

# what makes a model of a few thousand weights, and the names that configs use for it
_SIZES: dict[int | None, str] = {
    96: "vocab_size intermediate_size ffn_dim decoder_ffn_dim n_inner ffn_hidden_size",
    64: "hidden_size d_model n_embd embed_dim word_embed_proj_dim embedding_size mamba_d_ssm",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    4: "num_hidden_layers n_layer n_layers decoder_layers num_layers num_attention_heads n_head n_heads"
    " decoder_attention_heads num_experts num_local_experts n_routed_experts mamba_n_heads"
    " mamba_num_heads linear_num_value_heads",
    2: "num_key_value_heads num_experts_per_tok num_experts_per_token num_kv_shared_layers linear_num_key_heads",
    16: "head_dim kv_lora_rank v_head_dim mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim",
    128: "max_position_embeddings n_positions max_seq_len",
    1: "n_group topk_group first_k_dense_replace bos_token_id",
    8: "sliding_window attention_chunk_size qk_nope_head_dim qk_rope_head_dim mamba_d_state",
    24: "q_lora_rank",
    28: "image_size",
    14: "patch_size",
    0: "pad_token_id",
    None: "eos_token_id",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
SECONDS = 30  # of CPU time per family; the usual one takes 1
KINDS = ("paged", "gathered", "refused", "not built", "WRONG")
NOT_ESTIMATED = ("emu3_text_model", "jetmoe", "longcat_flash")  # do not run on the meta device
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
FAMILY: dict[str, dict] = {
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
}


@dataclass
class Row:
    """One family. kind: paged, gathered, refused, not built, WRONG."""

    family: str
    kind: str
    note: str = ""


def families() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str):
    """The family's config with small sizes, in its text part where it has one."""
    config_class = CONFIG_MAPPING[family]
    return config_class(**_small_arguments(config_class, FAMILY.get(family, {})))


def _small_arguments(config_class, extra):
    default = config_class()
    names = set(inspect.signature(config_class.__init__).parameters) | set(vars(default))
    arguments = {name: value for name, value in SMALL.items() if name in names and _has(default, name)}
    if "kv_lora_rank" in arguments:
        arguments["head_dim"] = arguments["qk_rope_head_dim"]
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    layers = next((arguments[name] for name in LAYER_COUNTS if name in arguments), 4)
    kinds = getattr(default, "layer_types", None)
    if kinds and "layer_types" in names:
        distinct = list(dict.fromkeys(kinds))
        arguments["layer_types"] = [distinct[i % len(distinct)] for i in range(layers)]
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if part is not None and name in names:
            arguments[name] = {**_small_arguments(type(part), {}), "model_type": part.model_type}
    arguments.update(extra)
    return arguments


def _has(config, name: str) -> bool:
    try:
        return getattr(config, name, None) is not None or name == "eos_token_id"
    except Exception:
        return False  # differs by layer


def build(family: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1)
    return model


def sharpen(model, factor: float) -> None:
    """Spread the weights, so that greedy choices are not near-ties."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)


def inputs():
    """Rows of 13 and 6 tokens, the second padded on the left; past the window of 8."""
    ids = torch.randint(5, 90, (2, 13), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    ids[1, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model):
    return model.generate(
        **inputs(), max_new_tokens=8, do_sample=False, return_dict_in_generate=True, output_logits=True, use_cache=True
    )


def run(family: str) -> Row:
    """Build, generate both ways, compare."""
    try:
        model = build(family)
        sharpen(model, 3.0)
        native = generate(model)
        if not all(logits.isfinite().all() for logits in native.logits):
            sharpen(model, 1 / 3.0)
            native = generate(model)
    except Exception as error:
        return Row(family, "not built", _short(error))
    try:
        pagedkv.patch(model, block_size=4, num_blocks=96)
    except UnsupportedModelError as error:
        return Row(family, "refused", str(error).split("blocks: ", 1)[-1])
    modes = layer_modes(model)
    try:
        paged = generate(model)
    except Exception as error:
        return Row(family, "WRONG", _short(error))
    pool = pagedkv.pool(model)
    if pool.peak_used_blocks == 0:
        return Row(family, "WRONG", "no block was used")
    try:
        estimated = estimated_block_bytes(model.config, pool.block_size, None)
    except InvalidArgumentError as error:
        if model.config.model_type not in NOT_ESTIMATED:
            return Row(family, "WRONG", _short(error))
    else:
        if estimated != pool.block_bytes:
            return Row(family, "WRONG", f"a block of {pool.block_bytes} bytes is estimated as {estimated}")
    worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(native.logits, paged.logits, strict=True))
    if not torch.equal(native.sequences, paged.sequences) or worst > 1e-4:
        return Row(family, "WRONG", f"logits differ by {worst:.1e} of their largest")
    counts = {mode: modes.count(mode) for mode in dict.fromkeys(modes)}
    kind = "paged" if "paged" in counts else "gathered"
    return Row(family, kind, ", ".join(f"{count} {mode}" for mode, count in counts.items()))


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


class TooSlow(Exception):
    """A family whose smallest model is still too large for a sweep."""


def _stop(signum, frame):
    raise TooSlow(f"over {SECONDS} s of CPU time")


def run_quietly(family: str) -> Row:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return run(family)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def table(rows: list[Row], counts: dict[str, int]) -> str:
    """docs/FAMILIES.md."""
    served = counts["paged"] + counts["gathered"]
    lines = [
        "# Model families",
        "",
        f"Every causal language model family of transformers {transformers.__version__}, built tiny with random "
        "weights, generates 8 tokens from two ragged prompts with its own cache and patched, in float32. `paged` and "
        "`gathered` mean that all tokens are equal and all logits agree to 1e-4 of their largest.",
        "",
        f"{served} of {len(rows)} families are served: {counts['paged']} paged (attention reads the blocks), "
        f"{counts['gathered']} gathered (keys and values are kept in blocks, and copied out for the model's own "
        "attention, because the model changes them, or its mask, after the cache). "
        f"{counts['refused']} are refused by `patch` with the reason; {counts['not built']} could not be built or run "
        "tiny, with their own cache, on this machine.",
        "",
        "Written by `python tests/hf/families.py --write`; CI compares a sample with a fresh run.",
        "",
        "| family | result | layers, or the reason |",
        "|---|---|---|",
    ]
    lines += [f"| {row.family} | {row.kind} | {row.note.replace('|', '/')} |" for row in rows]
    return "\n".join(lines) + "\n"


def read_table() -> dict[str, tuple[str, str]]:
    """family -> (kind, note) of docs/FAMILIES.md."""
    cells = [line.strip("| \n").split(" | ", 2) for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {name: (kind, note) for name, kind, note in cells if name != "family"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true", help="write docs/FAMILIES.md")
    args = parser.parse_args()
    rows = []
    for family in args.names or families():
        row = run_quietly(family)
        rows.append(row)
        print(f"{row.family:28} {row.kind:10} {row.note}", flush=True)
    counts = {
        kind: sum(row.kind == kind for row in rows) for kind in ("paged", "gathered", "refused", "not built", "WRONG")
    }
    print(counts)
    if args.write:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(table(rows, counts))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
