"""Compare llama.cpp's attention with ours: the slowdown of decoding with a long context.

    pip install llama-cpp-python
    python benchmarks/llama_attention.py --model FILE.gguf --depth 8000 --threads 1 [--out FILE.jsonl]

The weights differ (quantised in a GGUF file, float32 in ours), so tokens per second are not
comparable. The cost of the cache is comparable: milliseconds per token at the depth minus those at
depth 0, with the same threads. Ours run in transformers with packed attention. All take turns in
every round. The cache's bytes are those of all keys and values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
"""llama.cpp's cache types, with their numbers in its library."""

NEAR = 16
"""Number of tokens in the cache at "depth 0", so that the cache is not empty."""

Decode = Callable[[], float]


def llama_cpp(path: Path, cache: str, depth: int, threads: int, new_tokens: int) -> Decode:
    """Return a function that decodes after `depth` tokens and returns the milliseconds per token."""
    from llama_cpp import Llama

    kind = TYPES[cache]
    model = Llama(
        str(path), n_ctx=depth + 2 * new_tokens, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False,
        flash_attn=True, type_k=kind, type_v=kind,
    )  # fmt: skip
    ids = [1000 + i * 7919 % 40000 for i in range(depth)]
    model.eval(ids)

    def decode() -> float:
        model.n_tokens = depth
        start = time.perf_counter()
        for i in range(new_tokens):
            model.eval([1000 + i])
        return (time.perf_counter() - start) / new_tokens * 1e3

    return decode


def ours(recipe: str, depth: int, new_tokens: int) -> Decode:
    """Return the same function with transformers. `full` is its own cache."""
    import contextlib

    import tersekv
    from tersekv.models.loading import load

    model, _ = load("smollm2", dtype="float32")
    ids = torch.tensor([[1000 + i * 7919 % 40000 for i in range(depth)]])
    full = recipe == "full"
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config) if full else tersekv.CompressedCache(model.config, recipe)

    def attention() -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if full else tersekv.compress(model, recipe)

    with torch.inference_mode(), attention():
        for part in ids.split(512, dim=1):
            model(part, past_key_values=cache, logits_to_keep=1)

    def decode() -> float:
        with torch.inference_mode(), attention():
            start = time.perf_counter()
            for i in range(new_tokens):
                model(torch.tensor([[1000 + i]]), past_key_values=cache, logits_to_keep=1)
            spent = (time.perf_counter() - start) / new_tokens * 1e3
        cache.crop(-new_tokens)
        return spent

    return decode


def main() -> None:
    """Measure and print. With --out, append a record per cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M as a GGUF file")
    parser.add_argument("--recipe", action="append", help="recipe of our cache; default: default and kivi:bits=4")
    parser.add_argument("--depth", type=int, default=8000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    makers: dict[str, Callable[[int], Decode]] = {
        f"llama.cpp {kind}": lambda depth, kind=kind: llama_cpp(args.model, kind, depth, args.threads, args.new_tokens)
        for kind in TYPES
    } | {
        recipe: lambda depth, recipe=recipe: ours(recipe, depth, args.new_tokens)
        for recipe in ["full", *(args.recipe or ["default", "kivi:bits=4"])]
    }
    runs = {name: (make(NEAR), make(args.depth)) for name, make in makers.items()}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(args.rounds + 1):
        for name, (near, far) in runs.items():
            times = near(), far()
            if turn:  # the first round warms up
                spent[name].append(times)
    for name, times in spent.items():
        more = [far - near for near, far in times]
        record = {
            "cache": name, "depth": args.depth, "threads": args.threads, "new_tokens": args.new_tokens,
            "ms_near": [near for near, _ in times], "ms_far": [far for _, far in times],
            "ms_of_cache": statistics.median(more),
        }  # fmt: skip
        low, high = min(more), max(more)
        print(f"{name:20s} {record['ms_of_cache']:7.2f} ms more per token at {args.depth:,} ({low:.2f} to {high:.2f})")
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
