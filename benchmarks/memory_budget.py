"""Bytes and time per token of a long stream under `memory=…`, with a small model of random weights.

    python benchmarks/memory_budget.py --out benchmarks/records/memory_budget.jsonl            # run
    python benchmarks/memory_budget.py --out … --tokens 20000 --recipe "h2o:memory=1MB+exact"  # other options

The model has 2 layers, 4 query heads and 2 KV heads of 64 channels. A prompt of 4,096 random tokens is
read at once, then one token at a time. After every token the footprint is compared with the memory.
Each record has the largest footprint and the median time per token of a twentieth of the stream.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers as tf

import tersekv
from tersekv.recipe import Recipe
from tersekv.units import parse_bytes

RECIPES = (
    "streaming:memory=2MB,evict=block+turboquant:bits=4",
    "streaming:memory=2MB,rest=2,evict=block+turboquant:bits=4",
    "h2o:memory=2MB,evict=block+kivi:bits=4",
    "h2o:memory=2MB,rest=2,evict=block+kivi:bits=4",
)
PROMPT = 4096
PARTS = 20


def small_model(positions: int) -> tf.PreTrainedModel:
    """Return a Llama of random weights for this many positions."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=positions,
    )
    return tf.LlamaForCausalLM(config).eval()


@torch.no_grad()
def stream(recipe: str, tokens: int, out: Path) -> None:
    """Read the tokens and add a record per part of the stream."""
    model = small_model(tokens)
    limit = parse_bytes(Recipe.parse(recipe).policy().options()["memory"], "memory")
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(1))
    with tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model, recipe)
        model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
        times, most, part = [], 0, (tokens - PROMPT) // PARTS
        for i in range(PROMPT, tokens):
            start = time.perf_counter()
            model(ids[:, i : i + 1], past_key_values=cache)
            times.append(time.perf_counter() - start)
            most = max(most, cache.footprint().total_bytes)
            if len(times) == part:
                line = {"recipe": recipe, "tokens": i + 1, "memory": limit, "most_bytes": most}
                line |= {"milliseconds": round(1e3 * statistics.median(times), 3), "threads": torch.get_num_threads()}
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                print(line, flush=True)
                times, most = [], 0


def main() -> None:
    """Parse the options and run every recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", action="append", help="a recipe with memory=…; repeat")
    parser.add_argument("--tokens", type=int, default=200_000, help="length of the stream")
    parser.add_argument("--out", type=Path, required=True, help="file that records are added to")
    args = parser.parse_args()
    for recipe in args.recipe or RECIPES:
        stream(recipe, args.tokens, args.out)


if __name__ == "__main__":
    main()
