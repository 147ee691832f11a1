"""vLLM's engine as a process of its own, in an environment that has it: JSON lines on stdin, answers on stdout.

    python benchmarks/peers/vllm_engine.py MODEL --dtype bfloat16 --mode eager|compiled --max-num-seqs 64

Answers {"ready": version} once it is loaded and warm, then per line {"prompts": [[ids]], "new_tokens": n} answers
{"seconds": s, "token_ids": [[ids]]}.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no process hop in its steps
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", choices=["eager", "compiled"], default="eager")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever it prints goes to stderr

    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        args.model,
        dtype=args.dtype,
        enforce_eager=args.mode == "eager",
        max_model_len=1024,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def run(prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds, [list(output.outputs[0].token_ids) for output in outputs]

    run([[1, 2, 3, 4]] * 4, 4)
    print(json.dumps({"ready": vllm.__version__}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        seconds, token_ids = run(command["prompts"], command["new_tokens"])
        print(json.dumps({"seconds": seconds, "token_ids": token_ids}), file=answers)


if __name__ == "__main__":
    main()
