"""Save and load a packed prompt: bytes on disk, and seconds compared with a prefill.

    python benchmarks/prompt_cache.py [--out benchmarks/records/prompt_cache.jsonl] [--tokens 8000] [--rounds 5]
    python benchmarks/prompt_cache.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct=FILE.gguf --recipe default

A model reads tokens of Python's language reference once (an exact prefill). Each recipe packs
them, saves the cache and loads it. Loading is timed with the file in the page cache and after it
was evicted from there. The logits of the next tokens must first equal those of the original cache
bit for bit. Times are wall-clock and CPU seconds; on a busy machine CPU seconds are more reliable.
"""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import tersekv
from recorded import medians, parser, record, seconds, show
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

    def load_once(cold: bool) -> tuple[float, float]:
        if cold:
            forget(path)
        return seconds(lambda: CompressedCache.load(path, model))

    warm, cold = ([load_once(kind) for _ in range(rounds)] for kind in (False, True))
    held, size = cache.footprint(), path.stat().st_size
    times = {"pack": [pack], "save": [save], "load": warm, "cold_load": cold}
    return {
        "recipe": recipe, "tokens": first.shape[1], "file_bytes": size, "cache_bytes": held.total_bytes,
        "bf16_bytes": 2 * held.elements, "ratio_bf16": round(2 * held.elements / size, 3), "rounds": rounds,
        **{f"{name}_seconds": medians(taken) for name, taken in times.items()},
    }  # fmt: skip


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2", help="name, folder, GGUF file or Hub id, or HUB-ID=FOLDER")
    options.add_argument("--recipe", action="append", help="repeat for several (default: five)")
    options.add_argument("--tokens", type=int, default=8000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--out", type=Path, help="add records to this file")
    args = options.parse_args()
    name, _, where = args.model.rpartition("=")
    name = name or where
    model, tokenizer = load(where)
    ids, prefill = prompt(tokenizer, args.tokens + NEXT), Prefill(model)
    with torch.inference_mode():
        once = seconds(lambda: prefill.fill(DynamicCache(config=model.config), ids[:, :-NEXT]))
    about = {"bench": "prompt_cache", "model": name, "load_average": round(os.getloadavg()[0], 2)}
    about["prefill_seconds"] = medians([once])
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure(model, recipe, prefill, ids, args.rounds, Path(folder) / "cache")
            for recipe in args.recipe or RECIPES
        ]
    record(args.out, about, rows)
    times = ("pack", "save", "load", "cold_load")
    cells = [
        [row["recipe"], f"{row['file_bytes'] / 1e6:.1f}", row["ratio_bf16"], *(row[f"{t}_seconds"][0] for t in times)]
        for row in rows
    ]
    title = f"{name}, {args.tokens:,} tokens; prefill {once[0]:.1f} s, {once[1]:.1f} CPU seconds"
    show(title, ("recipe", "file MB", "smaller than bf16", *(f"{t} s" for t in times)), cells)


if __name__ == "__main__":
    main()
