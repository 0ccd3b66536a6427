"""Recipes on several models, texts and lengths, and what a divergence means.

    python benchmarks/three_models.py --model Qwen/Qwen2.5-0.5B=FOLDER --text C4=c4.txt --out FOLDER    # run.
    python benchmarks/three_models.py --centred --lengths 2048 --model … --text … --out FOLDER
    python benchmarks/three_models.py --rivals turboquant tri-tier --model … --text … --out FOLDER  # other packages.
    python benchmarks/three_models.py --record FOLDER                     # keep the results as records.

Each window is read once, exactly. Its first tokens are packed, and the tokens after them are scored 64 at
a time, in float32.
A preset must never be larger and never diverge more than `kivi:bits=4`. `code` is always among the
texts: the standard library's sources.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import recorded
import rival_caches
from measured.base import MODELS, Row, model, wrapped
from recorded import RECORDS as FOLDER
from recorded import markdown
from tersekv.calibration.capture import LayerTokens, capture_prompt
from tersekv.cli.installation import cpu_features
from tersekv.errors import UserError
from tersekv.hf.compress import compress
from tersekv.hf.prefill import fill_layers, held_by, new_cache
from tersekv.lab.evals import runs
from tersekv.lab.evals.reader import Reader
from tersekv.lab.evals.records import versions
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.evals.tasks.divergence import Divergence, compare, in_words
from tersekv.models.config import cache_shape
from tersekv.models.loading import load

RECORDS = FOLDER / "three_models.jsonl"
RECIPES = ("default", "safe", "kivi:bits=4")
METHODS = ("turboquant:bits=4", "polarquant", "qjl", "int4", "normalfloat", "kvarn", "kivi:bits=4")
SCORED = 256
LIMITS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, math.inf)
"""Upper ends of the ranges of divergence, in nats."""
MODULES = ("argparse", "typing", "inspect", "subprocess", "tarfile", "turtle")


def code(folder: Path) -> Path:
    """Write sources of the standard library to a file, and return it."""
    paths = [Path(__import__(name).__file__ or "") for name in MODULES]
    made = folder / "code.txt"
    made.write_text("\n\n".join(path.read_text(encoding="utf-8") for path in paths), encoding="utf-8")
    return made


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Evaluate every cell. A text is read once per window, and every length takes its first tokens from that."""
    names = [recipe for method in METHODS for recipe in (method, centred(method))] if args.centred else RECIPES
    names, about = args.rivals or names, {} if args.rivals else {"cpu": cpu_features()[0], "versions": versions()}
    for name in args.rivals:
        rival_caches.needed(name)
    for model_name, where in pairs(args.model):
        model, tokenizer = load(str(where), "float32")
        with tempfile.TemporaryDirectory() as folder:
            texts = pairs(args.text) + ([] if args.rivals else [("code", code(Path(folder)))])
            for text, path in texts:
                task = Divergence(text=str(path), context=max(args.lengths) + SCORED, windows=args.windows)
                cells: dict[int, dict[str, list[dict[str, Any]]]] = {length: {} for length in args.lengths}
                for window in task.instances(Reader(model, tokenizer)):
                    one_pass = Pass(model, window.data, args.lengths)
                    for length, of_names in cells.items():
                        for name in names:
                            found = one_pass.scores(name, length)
                            print(f"{model_name} {text} {length} {name}: {json.dumps(found)}", flush=True)
                            of_names.setdefault(name, []).append(found)
                made = [
                    {"text": text, "tokens": length, **about, **{name: mean(found) for name, found in of_names.items()}}
                    for length, of_names in cells.items()
                ]
                runs.append(args.out / "cells.jsonl", {"model": model_name, "windows": args.windows}, made)


class Pass:
    """One exact pass of a model over a window [1, T]: keys, values and queries of all layers, and the logits
    of the tokens that are scored."""

    def __init__(self, model: Any, window: torch.Tensor, lengths: list[int]) -> None:
        self.model, self.window = model, window
        scored = sorted({at for n in lengths for at in range(n, n + SCORED)})
        self.captured, logits = capture_prompt(model, window, True, torch.tensor(scored))
        self.logits = dict(zip(scored, logits, strict=True))

    def scores(self, name: str, length: int) -> dict[str, Any]:
        """Return divergence, agreement and size with a recipe or a rival, after `length` packed tokens."""
        more = self.window.shape[1] - length
        first = [
            (LayerTokens(keys[:, :, :length], values[:, :, :length]), call and call.without_last(more))
            for (keys, values), call in self.captured
        ]
        ids = self.window[:, length : length + SCORED]
        full = torch.stack([self.logits[at] for at in range(length, length + SCORED)])
        if name in rival_caches.RIVALS:
            return self.of_rival(name, [tokens for tokens, _ in first], ids, full)
        cache: Any = new_cache(self.model, name)
        with compress(self.model, cache):
            fill_layers(self.model, cache, first)
            logits = [self.model(part, past_key_values=cache).logits[0] for part in ids.split(64, dim=1)]
        return self.found(full, torch.cat(logits), held_by(cache).total_bytes, length)

    def of_rival(self, name: str, prompt: list[LayerTokens], ids: torch.Tensor, full: torch.Tensor) -> dict[str, Any]:
        """Return the scores of another package's cache, or in one line why it failed."""
        about = {
            "versions": version(rival_caches.RIVALS[name].package),
            "cpu": cpu_features()[0],
            "measured_by": versions(),
        }
        length = prompt[0].keys.shape[2]
        try:
            read = rival_caches.read(name, self.model, prompt, ids)
        except Exception as error:  # packages raise errors of every kind
            return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]} | about
        found = self.found(full, read.logits, read.held, length)
        bits_per_byte = found["bits"] / found["bytes"]
        return found | ({} if read.counted is None else {"counted": read.counted * bits_per_byte}) | about

    def found(self, full: torch.Tensor, logits: torch.Tensor, size: int, length: int) -> dict[str, Any]:
        """Return divergence, agreement and size of one reading."""
        kl, agree = compare(full, logits)
        bits = 8 * size / cache_shape(self.model.config).elements(length + SCORED)
        return {"kl": kl.mean().item(), "same": agree.mean().item(), "bits": bits, "bytes": size}


def mean(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over windows, with the standard error of the divergence. A failure stands for all windows."""
    for one in found:
        if "failed" in one:
            return one
    stderr = Estimate.of([one["kl"] for one in found]).stderr if len(found) > 1 else None
    means = {
        key: Estimate.of([one[key] for one in found]).mean
        for key in ("kl", "same", "bits", "bytes", "counted")
        if key in found[0]
    }
    return found[0] | means | {"stderr": stderr}


def centred(recipe: str) -> str:
    """Return the recipe with the mean of keys removed."""
    return f"{recipe}{',' if ':' in recipe else ':'}centre=true"


def record(folder: Path) -> None:
    """Add a folder's cells to the records, which they replace there."""
    lines = runs.read(RECORDS) if RECORDS.is_file() else []
    cells: dict[tuple[str, str, int], dict[str, Any]] = {}
    for one in [*lines, *runs.read(folder / "cells.jsonl")]:
        key = one["model"], one["text"], one["tokens"]
        cells[key] = cells.get(key, {}) | one
    made = (cells[key] for key in sorted(cells, key=lambda key: (key[0].lower(), key[2], key[1])))
    RECORDS.write_text("".join(runs.written(made, ("model", "windows"))), encoding="utf-8")


def of_methods(cells: list[Row]) -> str:
    """Return the table of methods without and with the mean of keys removed, on each model."""
    cells = [one for one in cells if centred(METHODS[0]) in one]
    names = [f"{model(one)}, {one['text']}" for one in cells]
    rows = (
        [f"`{method}`", *(f"{one[method]['kl']:.4f} → {one[centred(method)]['kl']:.4f}" for one in cells)]
        for method in METHODS
    )
    return markdown(("method", *names), rows)


def of_presets(cells: list[Row]) -> str:
    """Return the table of presets, and where each preset is worst."""
    cells = [one for one in cells if RECIPES[0] in one]
    rows = (
        [model(one), one["text"], f"{one['tokens']:,}"]
        + [f"{one[name]['bits']:.2f} bits, {one[name]['kl']:.4f}" for name in RECIPES]
        for one in cells
    )
    made = markdown(("model", "text", "tokens", *(f"`{name}`" for name in RECIPES)), rows)
    return "\n".join([made, "", *map("\n  ".join, worst(cells))])


def of_rivals(cells: list[Row]) -> str:
    """Return the table of other packages' caches beside the presets, of the cells that have them all, and the reasons
    of failures."""
    cells = [one for one in cells if one.keys() >= rival_caches.RIVALS.keys()]
    lines, failures = [], [""]
    for name in (*RECIPES, *rival_caches.RIVALS):
        label = f"`{name}`" if name in RECIPES else f"{name} {cells[0][name]['versions']}"
        lines.append([label])
        for one in cells:
            found = one[name]
            if "failed" in found:
                lines[-1].append("–")
                failures.append(wrapped(f"- {label} fails on {model(one)}: {found['failed'].split('. ')[0]}."))
            else:
                counted = f" (counts {found['counted']:.2f})" if "counted" in found else ""
                lines[-1].append(f"{found['bits']:.2f} bits{counted}, {found['kl']:.4f}")
    return "\n".join([markdown(("cache", *map(model, cells)), lines), *failures])


def of_words() -> str:
    """Return the share of next tokens that stay the same, by divergence, of all records that have both."""
    found: dict[tuple[float, str], list[float]] = {}
    names = tuple(dict.fromkeys(MODELS.values()))
    for path in sorted(RECORDS.parent.rglob("*.jsonl")):
        for row in runs.read(path):
            of_recipes = [one for one in row.values() if isinstance(one, dict) and "kl" in one]
            name = MODELS.get(row.get("model", ""))
            for one in of_recipes:
                kl, same = one["kl"], one.get("top1_agreement", one.get("same"))
                if name and same is not None and isinstance(kl, float) and kl > 0:
                    found.setdefault((next(limit for limit in LIMITS if kl < limit), name), []).append(same)

    def cell(limit: float, name: str) -> str:
        shares = found.get((limit, name))
        return f"{statistics.median(shares):.1%} ({len(shares)})" if shares else "–"

    ranges = [f"below {LIMITS[0]:g}", *(f"{low:g} to {high:g}" for low, high in pairwise(LIMITS[:-1])), "above 1"]
    rows = (
        [span, in_words(limit / 1.01 if math.isfinite(limit) else limit).split(":")[0].lower()]
        + [cell(limit, name) for name in names]
        for span, limit in zip(ranges, LIMITS, strict=True)
    )
    return markdown(("divergence, nats", "in words", *names), rows)


def worst(cells: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Return sentences about the cells where a preset is worst beside `kivi:bits=4`."""
    for name in RECIPES[:-1]:
        for what, said in (("kl", "divergence"), ("bytes", "size")):
            at = max(cells, key=lambda one: one[name][what] / one["kivi:bits=4"][what])
            ratio = at[name][what] / at["kivi:bits=4"][what]
            where = f"{model(at)}, {at['text']}, {at['tokens']:,} tokens"
            more = sum(one[name][what] > 1.0001 * one["kivi:bits=4"][what] for one in cells)
            yield (
                f"- `{name}`, {said}: worst cell {ratio:.2f} times that of `kivi:bits=4`",
                f"({where});",
                f"more than it in {more} of {len(cells)} cells.",
            )


def pairs(options: list[str]) -> list[tuple[str, Path]]:
    """Return NAME=VALUE options as pairs. A value that is missing is the name."""
    return [(name, Path(value or name)) for name, _, value in (option.partition("=") for option in options)]


def main() -> None:
    """Parse the options; run, or keep records."""
    parser = recorded.parser(__doc__)
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER, or a name; repeat for several")
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE; repeat for several")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 8192], help="tokens that are packed")
    parser.add_argument("--windows", type=int, default=1, help="windows of each text")
    parser.add_argument("--out", type=Path, help="run, and write results to this folder")
    parser.add_argument("--record", type=Path, help="folder whose results become records")
    parser.add_argument("--centred", action="store_true", help="run METHODS with and without `centre=true`")
    parser.add_argument(
        "--rivals", nargs="+", default=[], choices=rival_caches.RIVALS, help="run these packages' caches instead"
    )
    args = parser.parse_args()
    try:
        if args.out is not None:
            run(args)
    except UserError as error:
        raise SystemExit(str(error)) from error
    if args.record is not None:
        record(args.record)


if __name__ == "__main__":
    main()
