"""Token selection, codecs, and both combined at equal bytes, as in SubGen's Table 1 (arXiv
2402.06082).

    python benchmarks/selection.py --out folder                               # all cells; takes hours on two cores.
    python benchmarks/selection.py --out folder --cells passkey-1k --samples 50 --rows snapkv,subgen+turboquant4
    python benchmarks/selection.py --out folder --print                       # tables from records alone.

A cell is a task at one length with a byte budget, a share of the same tokens' bytes in 16 bits.
Each row is a recipe with one open number: the tokens kept, or the exact window of a codec. It is
made as large as the budget allows, to a block of 32 tokens. Codes, scales, tables, exact tokens and
positions count; spare capacity of buffers (slack) does not. A row whose smallest size exceeds the
budget is omitted.

The tables show the size after the answer, with and without slack. The context is packed before the
question is read. SnapKV and PyramidKV therefore select by the votes of the context's last 32
tokens. A stopped run continues where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tersekv.cache.estimate import CacheShape, predict
from tersekv.cli.estimate import load_shape
from tersekv.hf.models import load
from tersekv.lab.evals.harness import Harness
from tersekv.lab.evals.options import build
from tersekv.lab.evals.reader import FULL
from tersekv.lab.evals.records import Record, Records, read
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.recipe import Recipe

ROWS = {
    "turboquant1": "window:recent={n}+turboquant:bits=1",
    "turboquant2": "window:recent={n}+turboquant:bits=2",
    "kivi2": "window:recent={n}+kivi:bits=2",
    "streaming": "streaming:budget={n}+exact",
    "h2o": "h2o:budget={n},recent=32+exact",
    "snapkv": "snapkv:budget={n}+exact",
    "pyramidkv": "pyramidkv:budget={n}+exact",
    "subgen": "subgen:budget={n},recent=32+exact",
    "h2o+turboquant4": "h2o:budget={n},recent=32+turboquant:bits=4",
    "snapkv+turboquant4": "snapkv:budget={n}+turboquant:bits=4",
    "subgen+turboquant4": "subgen:budget={n},recent=32+turboquant:bits=4",
    "subgen+turboquant2": "subgen:budget={n},recent=32+turboquant:bits=2",
    "subgen+kivi4": "subgen:budget={n},recent=32+kivi:bits=4",
}
"""Recipe templates: codecs alone, selection alone, and both combined."""
SMALLEST = 40
"""Smallest number of tokens that a selection keeps: sinks, the latest 32, and a few more."""


@dataclass(frozen=True)
class Cell:
    """A task with its options, and the budget as a share of 16-bit bytes."""

    title: str
    task: str
    options: dict[str, str]
    share: float


CELLS = {
    "passkey-1k": Cell("Passkey, 1,024 tokens", "passkey", {"lengths": "1k"}, 1 / 6),
    "passkey-2k": Cell("Passkey, 2,048 tokens", "passkey", {"lengths": "2k"}, 1 / 8),
    "pairs-40": Cell("Lines, 40 pairs of name and number", "lines", {"lines": "40", "variant": "pairs"}, 1 / 5),
    "longeval-20": Cell("Lines, LongEval's wording, 20 lines", "lines", {"lines": "20", "variant": "longeval"}, 1 / 5),
}


def held(shape: CacheShape, recipe: str, tokens: int) -> float:
    """Return a recipe's share of 16-bit bytes after a prompt, without slack."""
    footprint = predict(shape, recipe, tokens)
    return (footprint.total_bytes - footprint.parts["slack"]) / (2 * footprint.elements)


def fitted(template: str, shape: CacheShape, tokens: int, share: float) -> str | None:
    """Return the template with a number that fits the share while the next larger one does not.

    Returns None if the smallest number does not fit. Bytes do not grow monotonically with the
    number, because an incomplete block of 32 tokens stays exact.
    """
    low, high = (0 if template.startswith("window") else SMALLEST), tokens
    if held(shape, template.format(n=low), tokens) > share:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        fits = held(shape, template.format(n=middle), tokens) <= share
        low, high = (middle, high) if fits else (low, middle)
    return template.format(n=low)


def measure(cell: Cell, rows: Sequence[str], args: argparse.Namespace) -> None:
    """Fit the recipes to the first prompt of seed 0 and evaluate them on all prompts."""
    model, tokenizer = load(args.model)
    full = Harness(model, tokenizer, args.model, []).full
    first: Any = build([cell.task], cell.options | {"samples": "1"})[cell.task].instances(full)[0].data
    shape = load_shape(args.model, with_weights=False)[0]
    recipes = [r for row in rows if (r := fitted(ROWS[row], shape, first.tokens(full), cell.share))]
    print(cell.title, *recipes, sep="\n  ", flush=True)
    run = Harness(model, tokenizer, args.model, recipes)
    tasks = build([cell.task], cell.options | {"samples": str(args.samples), "seed": str(args.seed)})
    with Records(args.out) as records:
        run.run(tasks, records)


def written(cell: Cell, records: Sequence[Record], model: str) -> str:
    """Return one cell in markdown, each recipe over all its samples of any seed, in the order of
    `_order`."""
    by_recipe = of_cell(cell, records, model)
    if FULL not in by_recipe:
        return ""
    dense = 16 / 8 * fmean(r["bytes"] / r["bits_per_element"] * 8 for r in by_recipe[FULL])
    lines = [
        f"### {cell.title}; room {dense * cell.share / 1e6:.2f} MB, 1/{1 / cell.share:.0f} of 16 bits",
        *("", "| recipe | samples | MB | with slack | accuracy | NLL of the answer |", "|---|---|---|---|---|---|"),
    ]
    for recipe in sorted(by_recipe, key=_order):
        of = by_recipe[recipe]
        accuracy, nll = (Estimate.of([r["metrics"][name] for r in of]) for name in ("accuracy", "gold_nll"))
        held_now, slack = fmean(r["bytes"] for r in of), fmean(r["bytes_by_part"].get("slack", 0) for r in of)
        lines.append(
            f"| `{recipe}` | {len(of)} | {(held_now - slack) / 1e6:.2f} | {held_now / 1e6:.2f} "
            f"| {accuracy.mean:.2f} ± {accuracy.stderr:.2f} | {nll.mean:.2f} ± {nll.stderr:.2f} |"
        )
    return "\n".join([*lines, "", _claim(by_recipe)])


def of_cell(cell: Cell, records: Sequence[Record], model: str) -> dict[str, list[Record]]:
    """Return the cell's records by recipe."""
    made: dict[str, list[Record]] = {}
    for record in records:
        options = {name: str(value) for name, value in record["options"].items()}
        if (record["task"], record["model"]) == (cell.task, model) and cell.options.items() <= options.items():
            made.setdefault(record["recipe"], []).append(record)
    return made


def _claim(by_recipe: dict[str, list[Record]]) -> str:
    """Compare the best combined recipe with the best other one, on the samples that both have."""
    scores = {
        recipe: {(r["seed"], r["sample"]): r["metrics"]["accuracy"] for r in of}
        for recipe, of in by_recipe.items()
        if recipe != FULL
    }
    both = [recipe for recipe in scores if _selects(recipe) and not recipe.endswith("+exact")]
    pure = [recipe for recipe in scores if recipe not in both]
    if not both or not pure:
        return ""
    best, rival = (max(names, key=lambda name: fmean(scores[name].values())) for names in (both, pure))
    common = scores[best].keys() & scores[rival].keys()
    gap = Estimate.of([scores[best][at] - scores[rival][at] for at in sorted(common)])
    return f"`{best}` less `{rival}`, {len(common)} samples: {gap.mean:+.2f} ± {gap.stderr:.2f}."


def _selects(recipe: str) -> bool:
    return Recipe.parse(recipe).policy().drops


def _order(recipe: str) -> tuple[bool, bool, str]:
    """Return a sort key: the full cache, codecs alone, selections alone, both."""
    selects = recipe != FULL and _selects(recipe)
    return recipe != FULL, selects, ("" if recipe.endswith("+exact") else "~") + recipe


def main() -> None:
    """Parse the options, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of records")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cells", default=",".join(CELLS), help=f"cells, from {', '.join(CELLS)}")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"rows, from {', '.join(ROWS)}")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="other seeds add samples")
    parser.add_argument("--print", action="store_true", help="print tables from existing records, run nothing")
    args = parser.parse_args()
    cells, rows = args.cells.split(","), args.rows.split(",")
    if unknown := [name for name in (*cells, *rows) if name not in CELLS | ROWS]:
        parser.error(f"unknown cells or rows: {', '.join(unknown)}")
    if not args.print:
        for name in cells:
            measure(CELLS[name], rows, args)
    records = read(args.out)
    print(*filter(None, (written(CELLS[name], records, args.model) for name in cells)), sep="\n\n")


if __name__ == "__main__":
    main()
