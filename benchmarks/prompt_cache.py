"""A prompt read once and loaded afterwards: bytes on disk and seconds against a prefill.

    python benchmarks/prompt_cache.py [--out benchmarks/records/prompt_cache.jsonl] [--tokens 8000] [--rounds 5]

SmolLM2-135M reads tokens of Python's language reference under each recipe (an exact prefill and packing), saves the
cache, and loads it again: in turns, with the file in the system's memory, and after it was given up there. First the
logits of the next 16 tokens must be equal, bit for bit, to those of the cache that was never saved.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tersekv
from tersekv.bench.generate import prompt
from tersekv.cli.env import cpu_features
from tersekv.hf.cache import CompressedCache
from tersekv.hf.models import load

RECIPES = ["exact:dtype=bf16", "kivi:bits=4", "polarquant", "kivi:bits=2"]
NEXT = 16


def logits(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Of the next tokens, one by one."""
    return torch.cat([model(i, past_key_values=cache, logits_to_keep=1).logits for i in ids.split(1, dim=1)])


def forget(path: Path) -> None:
    """The system gives up what it holds of a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def seconds_to_load(path: Path, model: Any, cold: bool) -> float:
    if cold:
        forget(path)
    start = time.perf_counter()
    CompressedCache.load(path, model)
    return time.perf_counter() - start


@torch.inference_mode()
def measure(model: Any, recipe: str, ids: Tensor, rounds: int, folder: Path) -> dict[str, Any]:
    """One recipe; ids [1, tokens + NEXT]."""
    first, following, path = ids[:, :-NEXT], ids[:, -NEXT:], folder / "cache"
    with tersekv.compress(model, recipe):
        cache = CompressedCache(model.config, recipe)
        start = time.perf_counter()
        model(first, past_key_values=cache, logits_to_keep=1)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        cache.save(path, first)
        save = time.perf_counter() - start
        expected = logits(model, copy.deepcopy(cache), following)
        if not torch.equal(logits(model, CompressedCache.load(path, model, ids), following), expected):
            raise SystemExit(f"{recipe}: a loaded cache gives other logits")
    warm, cold = ([seconds_to_load(path, model, kind) for _ in range(rounds)] for kind in (False, True))
    held, size = cache.footprint(), path.stat().st_size
    return {
        "recipe": recipe, "tokens": first.shape[1], "file_bytes": size, "cache_bytes": held.total_bytes,
        "bf16_bytes": 2 * held.elements, "ratio_bf16": round(2 * held.elements / size, 3),
        "prefill_seconds": round(prefill, 2), "save_seconds": round(save, 3),
        "load_seconds": round(statistics.median(warm), 4), "load_range": [round(t, 4) for t in (min(warm), max(warm))],
        "cold_load_seconds": round(statistics.median(cold), 4), "rounds": rounds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args()
    model, tokenizer = load("smollm2")
    ids = prompt(tokenizer, options.tokens + NEXT)
    table = Table(title=f"SmolLM2-135M, {options.tokens:,} tokens, {str(model.dtype).removeprefix('torch.')} weights")
    for column in ("recipe", "file MB", "times smaller than bfloat16", "prefill s", "save s", "load s", "cold load s"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    common = {
        "bench": "prompt_cache", "model": "smollm2", "cpu": cpu_features()[0], "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2), "torch": torch.__version__,
        "transformers": transformers.__version__, "tersekv": tersekv.__version__,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            row = measure(model, recipe, ids, options.rounds, Path(folder))
            times = (row[name] for name in ("prefill_seconds", "save_seconds", "load_seconds", "cold_load_seconds"))
            table.add_row(recipe, f"{row['file_bytes'] / 1e6:.1f}", f"{row['ratio_bf16']:.2f}", *map(str, times))
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(common | row) + "\n")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
