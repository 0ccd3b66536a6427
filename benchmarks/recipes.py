"""All methods on a small model: the table of docs/all-recipes.md, made from records.

    python benchmarks/recipes.py --text test.txt --calibration folder --out folder     # run, or continue a stopped run.
    python benchmarks/recipes.py --records FILE… --into docs/all-recipes.md          # write the table, run nothing.

For KL divergence and perplexity, a prefix is packed after one exact prefill. The next tokens are
read in chunks through the cache and scored. For passkey, the haystack is packed before the question
is read. Decoding speed comes from records of `tersekv bench generate`. `kvquant` needs its
calibrations (`tersekv calibrate`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch

from recorded import add_models
from tersekv import cli
from tersekv.cli.estimate import load_shape
from tersekv.lab.evals.harness import Summary
from tersekv.lab.evals.reader import FULL
from tersekv.lab.plots.decodings import Setting, read_decodings
from tersekv.lab.plots.groups import grouped, read_records
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict
from tersekv.transforms.rope import standard_rope

RECIPES = (
    *("kivi:bits=4", "kivi:bits=2", "int4", "normalfloat", "qjl", "polarquant", "kvquant:bits=4"),
    *("kvquant:bits=3", "kvquant:bits=2", "turboquant:bits=4", "turboquant:bits=3", "turboquant:bits=2.5"),
    *("turboquant:bits=2", "streaming:budget=0.25+exact", "subgen:budget=0.25+exact", "snapkv:budget=0.25+exact"),
    *("pyramidkv:budget=0.25+exact", "h2o:budget=0.25+exact", "snapkv:budget=0.25+kivi:bits=4"),
    "subgen:budget=0.25+polarquant",
    *(f"trellis:bits={b},calibration=prompt" for b in (5, 4, 3, 2)),
    *("trellis:bits=3", "trellis:bits=2"),
)
DIVERGENCE = ("--mode", "cache", "--context", "2304", "--prefix", "2048", "--chunk", "64", "--windows", "8")
PASSKEY = ("--lengths", "4k", "--samples", "5")
SMOLLM2 = CacheShape((None,) * 30, 3, 64, 64, torch.bfloat16, (standard_rope(64, 100_000.0),) * 30)
LONG = 32 * 1024
BEGIN, END = "<!-- recipes: made by benchmarks/recipes.py -->", "<!-- end of recipes -->"


def run(args: argparse.Namespace) -> None:
    """Evaluate every recipe with every model, except results that the folder already has."""
    recipes = [part for recipe in RECIPES for part in ("--recipe", recipe)]
    if args.calibration:
        recipes += ["--calibration", str(args.calibration)]
    tasks = (("divergence", "--text", args.text, *DIVERGENCE), ("passkey", *PASSKEY))
    for model, task in itertools.product(args.model or ["smollm2"], tasks):
        if status := cli.run(["eval", *task, *recipes, "--model", model, "--out", str(args.out)]):
            sys.exit(status)


def table(paths: list[Path], speeds: Path | None, dtype: str, model: str = "smollm2") -> str:
    """Return a model's table in markdown, with a dash where records are missing."""
    groups = [group for group in grouped(read_records(paths)) if group.model == model]
    if not groups:
        sys.exit(f"the records have no model {model}: give the --model that was run")
    by_task = {group.name: {s.recipe: s for s in group.summaries} for group in groups}
    shape = SMOLLM2 if model == "smollm2" else load_shape(model, with_weights=False)[0]
    near, far = by_task["divergence"], by_task.get("passkey", {})
    heading, rates = _rates(speeds, dtype)
    lines = [
        f"| recipe | true bits | perplexity | divergence (nats) | passkey at 4k | MB at 32k | {heading} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, summary in sorted(near.items(), key=lambda item: (item[0] != FULL, item[1].metrics["kl"].mean)):
        held = predict(shape, Recipe.parse("exact" if name == FULL else name), LONG).total_bytes
        cells = [
            "full (bfloat16)" if name == FULL else f"`{name}`",
            "16" if name == FULL else f"{summary.bits_per_element:.2f}",
            *([_written(summary, "perplexity_ratio", 3), _written(summary, "kl", 4)] if name != FULL else ["1", "0"]),
            _written(far[name], "accuracy", 2) if name in far else "–",
            f"{_full_bytes(shape) / 1e6 if name == FULL else held / 1e6:.0f}",
            f"{rates[name]:.1f}" if name in rates else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _full_bytes(shape: CacheShape) -> int:
    return 2 * shape.elements(LONG)


def _written(summary: Summary, metric: str, digits: int) -> str:
    mean, stderr = summary.metrics[metric]
    return f"{mean:.{digits}f} ± {stderr:.{digits}f}" if stderr else f"{mean:.{digits}f}"


def _rates(path: Path | None, dtype: str) -> tuple[str, dict[str, float]]:
    """Return the column's heading, and tokens per second by recipe after the longest context in the
    records."""
    if path is None:
        return "tokens/s", {}
    own = [rate for rate in read_decodings([path]) if rate.setting == Setting(dtype, None, "eager")]
    if not own:
        sys.exit(f"{path} has no records of {dtype} with prompts read whole: give another --dtype")
    longest = max(rate.context for rate in own)
    return f"tokens/s at {longest:,}, {dtype}", {rate.cache: rate.middle for rate in own if rate.context == longest}


def main() -> None:
    """Parse the options; run, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--text", default="pydoc", help="text for the divergence task")
    parser.add_argument("--calibration", type=Path, help="folder of kvquant's calibrations")
    parser.add_argument("--out", type=Path, help="run, and write records to this folder")
    parser.add_argument("--records", type=Path, nargs="+", help="records to make the table from")
    parser.add_argument("--speeds", type=Path, help="records of `tersekv bench generate`")
    parser.add_argument("--dtype", default="bfloat16", help="weight dtype of the quoted speeds")
    parser.add_argument("--into", type=Path, help="file whose table is replaced; default: print it")
    args = parser.parse_args()
    if args.out is None and args.records is None:
        parser.error("give --out to run, or --records to write the table")
    if args.into is not None and len(args.model or []) > 1:
        parser.error("--into has room for the table of one model: give one --model")
    if args.out is not None:
        run(args)
    tables = [table(args.records or [args.out], args.speeds, args.dtype, model) for model in args.model or ["smollm2"]]
    made = "\n\n".join(tables)
    if args.into is None:
        print(made)
        return
    text = args.into.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    args.into.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
