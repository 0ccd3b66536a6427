"""Storage files beside packed files and general compressors: bytes, divergence and passkeys after loading, times.

    python benchmarks/storage.py --text FILE [--model MODEL] [--prefix 2048] [--windows 4] [--out FILE]
    python benchmarks/storage.py --text FILE --passkeys 20 [--prefix 4096] [--storage RATE …] [--out FILE]
    python benchmarks/storage.py --text FILE --times 3 [--prefix 2048] [--storage RATE …] [--out FILE]

A model reads the first tokens of each window of a text once, exactly. Each cache holds them: packed
by a recipe, or stored at a rate and loaded into exact tokens, or into the recipe after the rate
(`2>default`). The next 256 tokens are scored 128 at a time, as by `tersekv eval divergence`. Bytes are those
of the file. Compressors get all keys and values in bfloat16, as they are, and with all low bytes before all
high ones. `lz4` is measured if its package is installed.

With --passkeys a storage file of the text before the question answers in place of the cache. With --times reading the
prompt, storing and loading take turns; seconds are of the clock and of the CPU, and the peak of memory while loading
is beside the bytes that the loaded cache holds.
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
from recorded import Row, add_models, medians, parser, record, seconds, show
from tersekv.cache.tensor_file import read_said
from tersekv.hf.cache import CompressedCache
from tersekv.hf.prefill import Prefill
from tersekv.lab.bench.memory import PeakMemory
from tersekv.lab.evals.reader import FULL, Reader
from tersekv.lab.evals.tasks.divergence import compare
from tersekv.lab.evals.tasks.passkey import Passkey
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


class StoredReader(Reader):
    """A reader whose cache of a context comes from a storage file. stored: rate, or RATE>RECIPE."""

    def __init__(self, model: Any, tokenizer: Any, stored: str, prefill: Prefill, path: Path) -> None:
        rate, _, recipe = stored.partition(">")
        super().__init__(model, tokenizer, recipe or "exact", prefill)
        self.rate, self.path = float(rate), path

    def read_context(self, ids: Tensor) -> CompressedCache:
        """Return the cache that is loaded from the file."""
        exact = CompressedCache(self.model, "exact")
        assert self._prefill is not None
        self._prefill.fill(exact, ids)
        exact.save(self.path, ids, self.model, storage=self.rate)
        return CompressedCache.load(self.path, self.model, ids, recipe=self.recipe)


def passkeys(model: Any, tokenizer: Any, args: argparse.Namespace, path: Path) -> Iterator[Row]:
    """Yield a row per passkey and cache."""
    prefill, task = Prefill(model), Passkey(samples=args.passkeys, lengths=str(args.prefix))
    full = Reader(model, tokenizer, FULL, prefill)
    readers = {"full": full, **{recipe: Reader(model, tokenizer, recipe, prefill) for recipe in args.recipe or RECIPES}}
    for stored in args.storage or RATES:
        readers[f"storage {stored}"] = StoredReader(model, tokenizer, stored, prefill, path)
    for sample in task.instances(full):
        for name, reader in readers.items():
            found = task.evaluate(sample, reader, full)
            yield {"passkey": sample.id, "cache": name, "accuracy": found.metrics["accuracy"]}


@torch.inference_mode()
def times(model: Any, ids: Tensor, args: argparse.Namespace, path: Path) -> Iterator[Row]:
    """Yield a row per rate: seconds to read the prompt ids [1, T], to store and to load it."""
    exact, reads = CompressedCache(model, "exact"), []

    def read() -> None:
        exact.reset()
        with tersekv.compress(model, exact):
            model(input_ids=ids, past_key_values=exact, logits_to_keep=1)

    for _ in range(args.times):
        reads.append(seconds(read))
    for stored in args.storage or RATES:
        rate, _, recipe = stored.partition(">")
        saves, loads = [], []
        for _ in range(args.times):
            saves.append(seconds(lambda rate=rate: exact.save(path, ids, model, storage=float(rate))))
            loads.append(seconds(lambda recipe=recipe: CompressedCache.load(path, model, recipe=recipe or "exact")))
        with PeakMemory() as memory:
            loaded = CompressedCache.load(path, model, recipe=recipe or "exact")
        held = loaded.footprint().total_bytes
        row: Row = {"cache": f"storage {stored}", "file_bytes": path.stat().st_size, "held_bytes": held}
        for name, found in (("read", reads), ("save", saves), ("load", loads)):
            row[f"{name}_seconds"] = medians(found)
        yield {**row, "load_peak_bytes": memory.peak_bytes}


def show_rows(title: str, rows: list[Row]) -> None:
    """Print rows as a table."""
    columns = [name for name in rows[0] if name not in ("window", "calibration", "bf16_bytes")]
    show(title, columns, [[row.get(name, "") for name in columns] for row in rows])


def main() -> None:
    options = parser(__doc__)
    add_models(options)
    options.add_argument("--text", type=Path, required=True)
    options.add_argument("--prefix", type=int, default=2048, help="tokens that are stored, or of a passkey's prompt")
    options.add_argument("--windows", type=int, default=4, help="number of windows, from the start of the text")
    options.add_argument("--recipe", action="append", help="packed beside; repeat for several")
    options.add_argument("--storage", action="append", help="rate, or RATE>RECIPE; repeat for several")
    options.add_argument("--passkeys", type=int, default=0, help="number of passkeys, in place of divergences")
    options.add_argument("--times", type=int, default=0, help="number of rounds of timings, in place of divergences")
    options.add_argument("--out", type=Path, help="add records to this file")
    args = options.parse_args()
    for named in args.model or ["smollm2"]:
        name, _, where = named.rpartition("=")
        model, tokenizer = load(where)
        ids = torch.tensor([tokenizer(args.text.read_text(encoding="utf-8"), verbose=False)["input_ids"]])
        length, prefill = args.prefix + SCORED, Prefill(model)
        with tempfile.TemporaryDirectory() as folder:
            path, about = Path(folder) / "cache", {"bench": "storage", "model": name or where, "tokens": args.prefix}
            if args.passkeys:
                found = [("passkeys", {"task": "passkey"}, passkeys(model, tokenizer, args, path))]
            elif args.times:
                found = [("times", {"task": "times"}, times(model, ids[:, : args.prefix], args, path))]
            else:
                cut = [ids[:, i * length : (i + 1) * length] for i in range(args.windows)]
                found = [(f"window {i}", {}, window(model, prefill, part, args, path)) for i, part in enumerate(cut)]
            for i, (title, more, measured) in enumerate(found):
                rows = [{"window": i, **row} if not more else row for row in measured]
                record(args.out, {**about, "text": args.text.name, **more}, rows)
                show_rows(f"{name or where}, {title}", rows)


if __name__ == "__main__":
    main()
