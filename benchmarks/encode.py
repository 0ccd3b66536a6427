"""Cost of packing a prompt: fitting and encoding, compared with one layer's prefill.

    python benchmarks/encode.py [--out benchmarks/records/encode.jsonl] [--rounds 7]

One decoder layer of SmolLM2-135M's shape reads 8,192 tokens (9 query heads, 3 key-value heads, head
dim 64; random weights, float32, SDPA). Then each recipe fits and encodes keys and values of as many
tokens, 1,024 at a time as the store does. It uses the kernels, and in a second run the torch
reference.

All take turns in every round. Results are medians, and ratios are taken within a round. On a busy
machine set OMP_NUM_THREADS=1, because torch's threads wait for each other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tersekv.cache.coding import chunks
from tersekv.cli.installation import cpu_features
from tersekv.kernels import backends
from tersekv.recipe import Recipe

RECIPES = [
    "polarquant",
    "polarquant:codebook=online",
    "polarquant:rotation=none",
    "turboquant:bits=3",
    "turboquant:bits=2.5",
    "turboquant:bits=3,variant=prod",
    "qjl",
    "kivi:bits=2",
    *(f"trellis:bits={bits},calibration=prompt" for bits in (2, 3, 4)),
]
SLOW = "trellis"
"""Method that is measured with the kernels only, because its search takes minutes in torch alone."""
TORCH_ALONE = "(torch alone)"
KV_HEADS, HEAD_DIM = 3, 64


def layer_prefill(tokens: int) -> Callable[[], None]:
    """Return the prefill of one decoder layer over `tokens` tokens."""
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=1, num_attention_heads=9,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=16, max_position_embeddings=tokens,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    hidden = torch.randn(1, tokens, 576)

    @torch.no_grad()
    def run() -> None:
        model(inputs_embeds=hidden, use_cache=True)

    return run


def packing(recipe: str, keys: Tensor, values: Tensor, backend: str) -> Callable[[], None]:
    """Return a function that fits and encodes keys and values."""
    plan = Recipe.parse(recipe).plan(20, 30)

    def run() -> None:
        with backends.forced(backend):
            for codec, x in ((plan.keys, keys), (plan.values, values)):
                fitted = codec.fit(x) if codec.fits_on else codec
                for start, stop in chunks(0, x.shape[2], fitted.layout(x.shape[-1]).block_tokens, x):
                    fitted.encode(x[:, :, start:stop])

    return run


def seconds(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(tokens: int, rounds: int) -> list[dict[str, Any]]:
    keys, values = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM).unbind(0)
    keys[..., ::9] *= 6  # outlier channels, as in real keys
    runs = {"one layer's prefill": layer_prefill(tokens)}
    for recipe in RECIPES:
        runs[recipe] = packing(recipe, keys, values, backends.AUTO)
        if not recipe.startswith(SLOW):
            runs[f"{recipe} {TORCH_ALONE}"] = packing(recipe, keys, values, "reference")
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    layer = next(iter(times.values()))
    rows = []
    for name, taken in times.items():
        ratios = sorted(t / base for t, base in zip(taken, layer, strict=True))
        rows.append({
            "what": name, "T": tokens, "rounds": rounds, "median_ms": round(statistics.median(taken) * 1e3, 1),
            "ratio_to_prefill": round(statistics.median(ratios), 3),
            "ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)],
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = measure(options.tokens, options.rounds)
    table = Table(title=f"keys and values of {options.tokens:,} tokens × {KV_HEADS} KV heads × {HEAD_DIM}")
    for column in ("what", "median ms", "of one layer's prefill", "range"):
        table.add_column(column, justify="left" if column == "what" else "right", overflow="fold")
    for row in rows:
        low, high = row["ratio_range"]
        table.add_row(
            row["what"], f"{row['median_ms']:,.0f}", f"{row['ratio_to_prefill']:.2f}", f"{low:.2f}–{high:.2f}"
        )
    Console().print(table)
    common = {
        "bench": "encode", "cpu": cpu_features()[0], "threads": torch.get_num_threads(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.writelines(json.dumps(common | row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
