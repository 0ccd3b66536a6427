"""Save and load a packed prompt: bytes on disk, and seconds compared with a prefill.

    python benchmarks/prompt_cache.py [--out benchmarks/records/prompt_cache.jsonl] [--tokens 8000] [--rounds 5]

SmolLM2-135M reads tokens of Python's language reference once (an exact prefill). Each recipe packs
them, saves the cache and loads it. Loading is timed with the file in the page cache and after it
was evicted from there. The logits of the next tokens must first equal those of the original cache
bit for bit. Times are wall-clock and CPU seconds; on a busy machine CPU seconds are more reliable.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

import tersekv
from tersekv.cli.installation import cpu_features
from tersekv.hf.cache import CompressedCache
from tersekv.hf.prefill import Prefill
from tersekv.lab.bench.generate import prompt
from tersekv.models.loading import load

RECIPES = ["exact:dtype=bf16", "kivi:bits=4", "polarquant", "kivi:bits=2", "subgen:budget=0.25+polarquant"]
NEXT = 4


def logits(model: Any, cache: CompressedCache, ids: Tensor) -> Tensor:
    """Return the logits of the next tokens, read one by one."""
    return torch.cat([model(i, past_key_values=cache, logits_to_keep=1).logits for i in ids.split(1, dim=1)])


def forget(path: Path) -> None:
    """Evict a file from the system's page cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


class Seconds(NamedTuple):
    """Wall-clock and CPU seconds."""

    clock: float
    cpu: float


def seconds(work: Callable[[], Any]) -> Seconds:
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - clock, time.process_time() - cpu)


def median(times: Sequence[Seconds]) -> Seconds:
    return Seconds(*(statistics.median(kind) for kind in zip(*times, strict=True)))


@torch.inference_mode()
def measure(model: Any, recipe: str, prefill: Prefill, ids: Tensor, rounds: int, path: Path) -> dict[str, Any]:
    """Measure one recipe. ids: [1, tokens + NEXT]."""
    first, following = ids[:, :-NEXT], ids[:, -NEXT:]
    cache = CompressedCache(model.config, recipe)
    pack = seconds(lambda: prefill.fill(cache, first))
    save = seconds(lambda: cache.save(path, first, model))
    with tersekv.compress(model, recipe):
        expected = logits(model, copy.deepcopy(cache), following)
        if not torch.equal(logits(model, CompressedCache.load(path, model, ids), following), expected):
            raise SystemExit(f"{recipe}: the loaded cache gives different logits")

    def load_once(cold: bool) -> Seconds:
        if cold:
            forget(path)
        return seconds(lambda: CompressedCache.load(path, model))

    warm, cold = ([load_once(kind) for _ in range(rounds)] for kind in (False, True))
    held, size = cache.footprint(), path.stat().st_size
    times = {"pack": pack, "save": save, "load": median(warm), "cold_load": median(cold)}
    return {
        "recipe": recipe, "tokens": first.shape[1], "file_bytes": size, "cache_bytes": held.total_bytes,
        "bf16_bytes": 2 * held.elements, "ratio_bf16": round(2 * held.elements / size, 3), "rounds": rounds,
        **{f"{name}_seconds": [round(t, 4) for t in taken] for name, taken in times.items()},
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
    for column in ("recipe", "file MB", "smaller than bf16", "pack s", "save s", "load s", "cold load s"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    prefill = Prefill(model)
    with torch.inference_mode():
        once = seconds(lambda: prefill.fill(DynamicCache(config=model.config), ids[:, :-NEXT]))
    common = {
        "bench": "prompt_cache", "model": "smollm2", "cpu": cpu_features()[0], "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2), "prefill_seconds": [round(t, 4) for t in once],
        "torch": torch.__version__, "transformers": transformers.__version__, "tersekv": tersekv.__version__,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            row = measure(model, recipe, prefill, ids, options.rounds, Path(folder) / "cache")
            times = (f"{row[f'{name}_seconds'][0]:.2f}" for name in ("pack", "save", "load", "cold_load"))
            table.add_row(recipe, f"{row['file_bytes'] / 1e6:.1f}", f"{row['ratio_bf16']:.2f}", *times)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(common | row) + "\n")
    Console(width=120).print(table, f"prefill: {once.clock:.1f} s, {once.cpu:.1f} CPU seconds")


if __name__ == "__main__":
    main()
