"""Recipes on several models, texts and lengths: the tables of docs/presets.md and docs/methods/centred.md.

    python benchmarks/three_models.py --model Qwen/Qwen2.5-0.5B=FOLDER --text C4=c4.txt --out FOLDER    # run.
    python benchmarks/three_models.py --centred --lengths 2048 --model … --text … --out FOLDER
    python benchmarks/three_models.py --record FOLDER                     # keep the results as records.
    python benchmarks/three_models.py --into docs/presets.md docs/methods/centred.md  # write the tables from them.

A prefix is packed after one exact prefill, and the tokens after it are scored 64 at a time, in float32.
A preset must never be larger and never diverge more than `kivi:bits=4`. `code` is always among the
texts: the standard library's sources.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import QuantizedCache

from tersekv.errors import UserError
from tersekv.hf.config import cache_shape
from tersekv.hf.models import load
from tersekv.lab.evals.harness import Harness
from tersekv.lab.evals.options import build
from tersekv.lab.evals.records import Records
from tersekv.lab.evals.tasks.divergence import compare
from tersekv.recipe import Recipe

RECORDS = Path(__file__).parent / "records" / "three_models.jsonl"
BEGIN, END = "<!-- {}: made by benchmarks/three_models.py -->", "<!-- end of {} -->"
RECIPES = ("default", "safe", "kivi:bits=4")
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}
AXES = {"hqq": {"axis_key": 1, "axis_value": 1}}  # hqq allows no other
METHODS = ("turboquant:bits=4", "polarquant", "qjl", "int4", "normalfloat", "kvarn", "kivi:bits=4")
SCORED = 256
MODULES = ("argparse", "typing", "inspect", "subprocess", "tarfile", "turtle")


def code(folder: Path) -> Path:
    """Write sources of the standard library to a file, and return it."""
    paths = [Path(__import__(name).__file__ or "") for name in MODULES]
    made = folder / "code.txt"
    made.write_text("\n\n".join(path.read_text(encoding="utf-8") for path in paths), encoding="utf-8")
    return made


def run(args: argparse.Namespace) -> None:
    """Evaluate every cell that the folder does not have yet."""
    chosen = [recipe for method in METHODS for recipe in (method, centred(method))] if args.centred else RECIPES
    names = {str(Recipe.parse(name)): name for name in chosen}
    for model_name, where in pairs(args.model):
        model, tokenizer = load(str(where), "float32")
        harness = Harness(model, tokenizer, model_name, list(names))
        with tempfile.TemporaryDirectory() as folder:
            texts = [*pairs(args.text), ("code", code(Path(folder)))]
            for text, path in texts:
                for length in args.lengths:
                    options = {
                        "mode": "cache", "context": str(length + SCORED), "prefix": str(length), "chunk": "64",
                        "windows": str(args.windows), "text": str(path),
                    }  # fmt: skip
                    with Records(args.out / "raw" / model_name.replace("/", "--") / text) as records:
                        summaries = harness.run(build(["divergence"], options), records)
                    full, *each = summaries
                    task = next(iter(build(["divergence"], options).values()))
                    line = {"model": model_name, "text": text, "tokens": length, "windows": full.samples}
                    for summary in each:
                        kl, agree = summary.metrics["kl"], summary.metrics["top1_agreement"]
                        line[names[summary.recipe]] = {
                            "kl": kl.mean, "stderr": kl.stderr if full.samples > 1 else None, "same": agree.mean,
                            "bits": summary.bits_per_element, "bytes": summary.bytes,
                        }  # fmt: skip
                    for backend in args.rivals:
                        line[backend] = rival(backend, harness, task, length)
                    print(json.dumps(line), flush=True)
                    with (args.out / "cells.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")


@torch.no_grad()
def rival(backend: str, harness: Harness, task: Any, prefix: int) -> dict[str, Any]:
    """Return the results of transformers' own `QuantizedCache` with 4 bits on the same windows.

    backend: quanto or hqq. Its options are transformers' defaults. Bytes are those of all tensors held.
    """
    model, found = harness.full.model, []
    shape = cache_shape(model.config)
    for sample in task.instances(harness.full):
        cache = QuantizedCache(backend, model.config, nbits=4, **AXES.get(backend, {}))
        model(sample.data[:, :prefix], past_key_values=cache, logits_to_keep=1)
        parts = sample.data[:, prefix:].split(64, dim=1)
        logits = torch.cat([model(part, past_key_values=cache).logits[0] for part in parts])
        kl, agree = compare(task.logits(sample, harness.full)[0], logits)
        size = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in held(vars(layer)))
        found.append((kl.mean().item(), agree.mean().item(), size))
    kl, agree, size = (sum(column) / len(found) for column in zip(*found, strict=True))
    bits = 8 * size / shape.elements(prefix + SCORED)
    return {
        "kl": kl,
        "stderr": None,
        "same": agree,
        "bits": bits,
        "bytes": size,
        "versions": version(PACKAGES[backend]),
    }


def held(value: Any) -> Iterator[torch.Tensor]:
    """Return all plain tensors in an object of a quantised cache."""
    if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__") and type(value) is not torch.Tensor:
        for name in value.__tensor_flatten__()[0]:
            yield from held(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from held(one)


def centred(recipe: str) -> str:
    """Return the recipe with the mean of keys removed."""
    return f"{recipe}{',' if ':' in recipe else ':'}centre=true"


def record(folder: Path) -> None:
    """Add a folder's cells to the records, which they replace there."""
    lines = read(RECORDS) if RECORDS.is_file() else []
    cells: dict[tuple[str, str, int], dict[str, Any]] = {}
    for one in [*lines, *read(folder / "cells.jsonl")]:
        key = one["model"], one["text"], one["tokens"]
        cells[key] = cells.get(key, {}) | one
    made = (json.dumps(cells[key]) for key in sorted(cells, key=lambda key: (key[0].lower(), key[2], key[1])))
    RECORDS.write_text("\n".join(made) + "\n", encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the cells in a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def of_methods(cells: list[dict[str, Any]]) -> str:
    """Return the table of methods without and with the mean of keys removed, on each model."""
    cells = [one for one in cells if centred(METHODS[0]) in one]
    models = [one["model"].split("/")[-1] for one in cells]
    parts = [f"| method | {' | '.join(models)} |", f"|---|{'---|' * len(models)}"]
    for method in METHODS:
        held = (f"{one[method]['kl']:.4f} → {one[centred(method)]['kl']:.4f}" for one in cells)
        parts.append(f"| `{method}` | {' | '.join(held)} |")
    return "\n".join(parts)


def of_presets(cells: list[dict[str, Any]]) -> str:
    """Return a table per model in Markdown, and the worst cell of each preset."""
    parts, cells = [], [one for one in cells if RECIPES[0] in one]
    for model in dict.fromkeys(one["model"] for one in cells):
        heads = " | ".join(f"`{name}`" for name in RECIPES)
        parts += [f"**{model}**", "", f"| text, tokens, windows | {heads} |", f"|---|{'---|' * len(RECIPES)}"]
        for one in (one for one in cells if one["model"] == model):
            held = (f"{one[name]['bits']:.2f} bits, {one[name]['kl']:.4f}" for name in RECIPES)
            parts.append(f"| {one['text']}, {one['tokens']:,}, {one['windows']} | {' | '.join(held)} |")
        parts.append("")
    return "\n".join([*parts, *map("\n  ".join, worst(cells)), *map("\n  ".join, of_rivals(cells))])


def of_rivals(cells: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Return sentences about transformers' own quantised cache."""
    for one in cells:
        for backend in (backend for backend in PACKAGES if backend in one):
            held, ours = one[backend], one["default"]
            yield (
                f"- `QuantizedCache` of transformers, {backend} {held['versions']}, 4 bits:",
                f"{held['bits']:.2f} bits, {held['kl']:.3f} nats; `default` {ours['bits']:.2f} and {ours['kl']:.4f}",
                f"({one['model'].split('/')[-1]}, {one['text']}, {one['tokens']:,} tokens).",
            )


def worst(cells: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Return sentences about the cells where a preset is worst beside `kivi:bits=4`."""
    for name in RECIPES[:-1]:
        for what, said in (("kl", "divergence"), ("bytes", "size")):
            at = max(cells, key=lambda one: one[name][what] / one["kivi:bits=4"][what])
            ratio = at[name][what] / at["kivi:bits=4"][what]
            where = f"{at['model'].split('/')[-1]}, {at['text']}, {at['tokens']:,} tokens"
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
    """Parse the options; run, keep records, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="NAME=FOLDER, or a name; repeat for several")
    parser.add_argument("--text", action="append", default=[], help="NAME=FILE; repeat for several")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 8192], help="tokens that are packed")
    parser.add_argument("--windows", type=int, default=1, help="windows of each text")
    parser.add_argument("--out", type=Path, help="run, and write results to this folder")
    parser.add_argument("--record", type=Path, help="folder whose results become records")
    parser.add_argument("--centred", action="store_true", help="run METHODS with and without `centre=true`")
    parser.add_argument("--rivals", nargs="+", default=[], choices=PACKAGES, help="run transformers' own cache, too")
    parser.add_argument("--into", type=Path, nargs="+", default=[], help="pages whose tables are replaced")
    args = parser.parse_args()
    try:
        if args.out is not None:
            run(args)
    except UserError as error:
        raise SystemExit(str(error)) from error
    if args.record is not None:
        record(args.record)
    for page in args.into:
        text = page.read_text(encoding="utf-8")
        for name, made in (("presets", of_presets), ("centred", of_methods)):
            begin, end = BEGIN.format(name), END.format(name)
            if begin in text:
                before, rest = text.split(begin)
                text = f"{before}{begin}\n{made(read(RECORDS))}\n{end}{rest.split(end)[1]}"
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
