"""Storage files beside packed files and general compressors: bytes, and divergence after loading.

    python benchmarks/storage.py --text FILE [--model MODEL] [--prefix 2048] [--windows 4] [--out FILE]

A model reads the first tokens of each window of a text once, exactly. Each cache holds them: packed
by a recipe, or stored at a rate and loaded into exact tokens, or into the recipe after the rate
(`2>default`). The next 256 tokens are scored 128 at a time, as by `tersekv eval divergence`. Bytes are those
of the file. Compressors get all keys and values in bfloat16, as they are, and with all low bytes before all
high ones. `lz4` is measured if its package is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tersekv
from recorded import Row, add_models, parser, record, show
from tersekv.cache.tensor_file import read_said
from tersekv.hf.cache import CompressedCache
from tersekv.hf.prefill import Prefill
from tersekv.lab.evals.tasks.divergence import compare
from tersekv.models.loading import load

SCORED, CHUNK = 256, 128
RATES = ["3", "2", "1.5", "1", "2>default"]
RECIPES = ["default", "safe", "trellis:bits=2,calibration=prompt"]


def divergence(model: Any, cache: CompressedCache, following: Tensor, full: Tensor) -> float:
    """Return the mean divergence of the tokens after those of a cache. full: their logits with the full cache."""
    with tersekv.compress(model, cache):
        parts = [model(input_ids=part, past_key_values=cache).logits[0] for part in following.split(CHUNK, dim=1)]
    return float(compare(full, torch.cat(parts))[0].mean())


def compressors() -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    """Yield the general compressors by name."""
    zstandard = importlib.import_module("zstandard")
    yield "zstd", zstandard.ZstdCompressor(level=3).compress
    with contextlib.suppress(ImportError):
        yield "lz4", importlib.import_module("lz4.frame").compress


def compressed(cache: CompressedCache) -> Iterator[tuple[str, int]]:
    """Yield the sizes in bytes of the keys and values in bfloat16, as compressors leave them."""
    layers = [layer.store.decoded(torch.bfloat16) for layer in cache.layers if getattr(layer, "store", None)]
    parts = [x.contiguous().view(torch.uint8).reshape(-1, 2) for both in layers for x in both]
    for name, run in compressors():
        yield f"bfloat16, {name}", sum(len(run(x.numpy().tobytes())) for x in parts)
        yield f"bfloat16 by bytes, {name}", sum(len(run(x.T.contiguous().numpy().tobytes())) for x in parts)


@torch.inference_mode()
def window(model: Any, prefill: Prefill, ids: Tensor, args: argparse.Namespace, path: Path) -> Iterator[Row]:
    """Yield the rows of a window, ids [1, prefix + SCORED]."""
    first, following = ids[:, : args.prefix], ids[:, args.prefix :]
    full = model(input_ids=ids, use_cache=False, logits_to_keep=SCORED).logits[0]
    exact = CompressedCache(model, "exact")
    prefill.fill(exact, first)
    plain = 2 * exact.footprint().elements

    def row(name: str, size: int, **more: Any) -> Row:
        return {"cache": name, "file_bytes": size, "bf16_bytes": plain, "ratio_bf16": round(plain / size, 3), **more}

    for name, size in compressed(exact):
        yield row(name, size, kl=0.0)
    for recipe in args.recipe or RECIPES:
        cache = CompressedCache(model, recipe)
        prefill.fill(cache, first)
        cache.save(path, first, model)
        yield row(recipe, path.stat().st_size, kl=divergence(model, cache, following, full))
    for stored in args.storage or RATES:
        rate, _, recipe = stored.partition(">")
        exact.save(path, first, model, storage=float(rate))
        cache = CompressedCache.load(path, model, first, recipe=recipe or "exact")
        said = read_said(path)[0]["storage"]
        more = {"bases": said["bases"], "calibration": said["calibration"]}
        yield row(f"storage {stored}", path.stat().st_size, kl=divergence(model, cache, following, full), **more)


def main() -> None:
    options = parser(__doc__)
    add_models(options)
    options.add_argument("--text", type=Path, required=True)
    options.add_argument("--prefix", type=int, default=2048, help="tokens that are stored")
    options.add_argument("--windows", type=int, default=4, help="number of windows, from the start of the text")
    options.add_argument("--recipe", action="append", help="packed beside; repeat for several")
    options.add_argument("--storage", action="append", help="rate, or RATE>RECIPE; repeat for several")
    options.add_argument("--out", type=Path, help="add records to this file")
    args = options.parse_args()
    for named in args.model or ["smollm2"]:
        name, _, where = named.rpartition("=")
        model, tokenizer = load(where)
        prefill, length = Prefill(model), args.prefix + SCORED
        ids = torch.tensor([tokenizer(args.text.read_text(encoding="utf-8"), verbose=False)["input_ids"]])
        for i in range(args.windows):
            with tempfile.TemporaryDirectory() as folder:
                part = ids[:, i * length : (i + 1) * length]
                rows = [{"window": i, **row} for row in window(model, prefill, part, args, Path(folder) / "cache")]
            about = {"bench": "storage", "model": name or where, "text": args.text.name, "tokens": args.prefix}
            record(args.out, about, rows)
            cells = [(row["cache"], row["file_bytes"], row["ratio_bf16"], f"{row['kl']:.5f}") for row in rows]
            show(f"{name or where}, window {i}", ("cache", "bytes", "smaller than bfloat16", "KL, nats"), cells)


if __name__ == "__main__":
    main()
