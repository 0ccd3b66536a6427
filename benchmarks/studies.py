"""Methods side by side on a small model: tables of `tersekv eval divergence`, `passkey` and others.

    python benchmarks/studies.py recipes --text test.txt --calibration DIR --out DIR     # run, or continue.
    python benchmarks/studies.py recipes --records FILE…                                 # print its tables.

Studies: `recipes`, all methods; `rivals`, OSCAR and KVarN beside others; `bias`, correction of packed tokens' softmax
weights.

KL divergence: 2,048 tokens are packed after one exact prefill, and the next 256 are read 64 at a
time. Other tasks: the text is packed before the question is read. `recipes` needs calibrations of
`kvquant` and `trellis`, and `rivals` of `oscar`: `tersekv calibrate --recipe oscar --recipe
oscar:rotation=head`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from measured.base import cache, estimate
from recorded import add_models, markdown, parser
from tersekv import cli
from tersekv.hf.facts import load_shape
from tersekv.lab.evals.harness import Summary
from tersekv.lab.evals.reader import FULL
from tersekv.lab.plots.groups import grouped, read_records
from tersekv.policies.base import CORRECTED_SHARES
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict
from tersekv.transforms.rope import standard_rope

Found = dict[str, dict[str, Summary]]
"""Summaries by task and recipe."""

TRELLIS = "trellis:bits={},calibration=prompt"
METHODS = (
    *("kivi:bits=4", "kivi:bits=2", "int4", "normalfloat", "qjl", "polarquant", "kvquant:bits=4"),
    *("kvquant:bits=3", "kvquant:bits=2", "turboquant:bits=4", "turboquant:bits=3", "turboquant:bits=2.5"),
    *("turboquant:bits=2", "streaming:budget=0.25+exact", "subgen:budget=0.25+exact", "snapkv:budget=0.25+exact"),
    *("pyramidkv:budget=0.25+exact", "h2o:budget=0.25+exact", "snapkv:budget=0.25+kivi:bits=4"),
    "subgen:budget=0.25+polarquant",
    *map(TRELLIS.format, (5, 4, 3, 2)),
    *("trellis:bits=3", "trellis:bits=2"),
)
"""Recipes of the study `recipes`."""
WINDOWS = (
    *("window:sinks=128,recent=128+kvarn:bits=2", "window:sinks=64,recent=256+oscar:bits=2"),
    "window:sinks=128,recent=128+kvarn:bits=4/kvarn:bits=2",
    f"window:sinks=64,recent=256+{TRELLIS.format(2)}",
)
"""Recipes with the published windows and rates."""


def beside(bits: int) -> tuple[str, ...]:
    """Return KVarN, OSCAR and other methods with so many bits. `turboquant` has fewer true bits than `oscar`, and with
    half a bit more also more."""
    ours = TRELLIS.format(bits), f"kvarn:bits={bits}", f"oscar:bits={bits}"
    return (*ours, f"turboquant:bits={bits}", f"turboquant:bits={bits + 0.5}", f"kivi:bits={bits}")


RIVALS = (
    *(*beside(2), *beside(3), *WINDOWS),
    *("kvarn:bits=2,steps=0", "kvarn:bits=2,tile=64", "kvarn:bits=4/kvarn:bits=2"),
    *("oscar:bits=2,rotation=head", "oscar:bits=2,calibration=prompt", "oscar:bits=2,key_clip=1,value_clip=1"),
)
"""Recipes of the study `rivals`. The last six leave out or exchange a part."""
RETRIEVAL = (*beside(2), *WINDOWS[:3], TRELLIS.format(3))
"""Recipes of `rivals` that look for passkeys."""
CORRECTED = (
    *map(TRELLIS.format, (1, 2, 3)),
    *("kivi:bits=2", "kivi:bits=4", "int4", "turboquant:bits=2", "turboquant:bits=4"),
    *("turboquant:bits=2,variant=prod", "qjl", "polarquant", "kvquant:bits=2,calibration=prompt"),
)
"""Recipes of the study `bias`."""
FAR = (*CORRECTED[:2], "kivi:bits=2", "turboquant:bits=2,variant=prod", "qjl")
METRICS = (("divergence", "kl", 4), *((task, "gold_nll", 3) for task in ("passkey", "lines", "needle")))

DIVERGENCE = ("--mode", "cache", "--context", "2304", "--prefix", "2048", "--chunk", "64", "--windows")
SMOLLM2 = CacheShape((None,) * 30, 3, 64, 64, torch.bfloat16, (standard_rope(64, 100_000.0),) * 30, 9)
LONG = 32 * 1024
"""Tokens of the caches whose sizes are quoted."""


class Task(NamedTuple):
    """A task with its options, and the recipes that it is run with."""

    name: str
    options: tuple[str, ...]
    recipes: tuple[str, ...]


def written(recipe: str) -> str:
    """Return the recipe as records name it."""
    return str(Recipe.parse(recipe))


def corrected(recipe: str, share: str) -> str:
    """Return the recipe with this value of `bias_correction`."""
    return recipe if share == "off" else f"window:bias_correction={share}+{recipe}"


def _every_share(recipes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(corrected(recipe, share) for recipe in recipes for share in CORRECTED_SHARES)


TASKS = {
    "recipes": (
        Task("divergence", (*DIVERGENCE, "8"), METHODS),
        Task("passkey", ("--lengths", "4k", "--samples", "5"), METHODS),
    ),
    "rivals": (
        Task("divergence", (*DIVERGENCE, "4"), tuple(map(written, RIVALS))),
        Task("passkey", ("--lengths", "2k", "--samples", "10"), tuple(map(written, RETRIEVAL))),
    ),
    "bias": (
        Task("divergence", (*DIVERGENCE, "4"), _every_share(CORRECTED)),
        Task("passkey", ("--lengths", "2k", "--samples", "5"), _every_share(FAR)),
        Task("lines", ("--lines", "10", "--samples", "2"), _every_share(FAR[:3])),
        Task("needle", ("--lengths", "1k", "--depths", "10,50,90", "--samples", "2"), _every_share(FAR[:3])),
    ),
}


def run(args: argparse.Namespace) -> None:
    """Evaluate every recipe with every model, except results that the folder already has."""
    for model, task in itertools.product(args.model or ["smollm2"], TASKS[args.study]):
        asked = [part for recipe in task.recipes for part in ("--recipe", recipe)]
        asked += ["--text", args.text] if task.name == "divergence" else []
        asked += ["--calibration", str(args.calibration)] if args.calibration else []
        if status := cli.run(["eval", task.name, *task.options, *asked, "--model", model, "--out", str(args.out)]):
            sys.exit(status)


def summaries(paths: list[Path], model: str) -> Found:
    """Return a model's summaries."""
    groups = [group for group in grouped(read_records(paths)) if group.model == model]
    if not groups:
        sys.exit(f"the records have no model {model}: give the --model that was run")
    return {group.name: {summary.recipe: summary for summary in group.summaries} for group in groups}


# ---------------------------------------------------------------- tables


def table_of_methods(found: Found, shape: CacheShape = SMOLLM2) -> str:
    """Return a model's table of all methods, with a dash where records are missing. shape: of its caches."""
    near, far = found["divergence"], found.get("passkey", {})
    rows = []
    for name, summary in sorted(near.items(), key=lambda item: (item[0] != FULL, item[1].metrics["kl"].mean)):
        key = estimate(far[name].metrics["accuracy"], 2) if name in far else "–"
        if name == FULL:
            rows.append(["full (bfloat16)", "16", "1", "0", "1", key, f"{2 * shape.elements(LONG) / 1e6:.0f}"])
            continue
        parts = (("perplexity_ratio", 3), ("kl", 4), ("top1_agreement", 3))
        ratio, kl, same = (estimate(summary.metrics[metric], digits) for metric, digits in parts)
        held = predict(shape, Recipe.parse(name), LONG).total_bytes
        rows.append([cache(name), f"{summary.bits_per_element:.2f}", ratio, kl, same, key, f"{held / 1e6:.0f}"])
    columns = (
        "recipe",
        "true bits",
        "perplexity",
        "divergence (nats)",
        "same next token",
        "passkey at 4k",
        "MB at 32k",
    )
    return markdown(columns, rows)


def table_of_rivals(found: Found) -> str:
    """Return a table of the recipes whose divergence was measured, by their bits."""
    near, far = found.get("divergence", {}), found.get("passkey", {})
    rows = []
    for recipe, summary in near.items():
        if recipe != FULL:
            bits = predict(SMOLLM2, Recipe.parse(recipe), LONG).total_bytes * 8 / SMOLLM2.elements(LONG)
            cells = [estimate(summary.metrics["kl"]), estimate(summary.metrics["kl_p99"], 2)]
            cells += [f"{summary.metrics['top1_agreement'].mean:.3f}", _passkeys(far.get(recipe))]
            rows.append([f"`{recipe}`", f"{bits:.2f}", *cells])
    columns = ("recipe", "true bits at 32k", "KL, nats", "99th percentile", "same next token", "passkeys (NLL)")
    return markdown(columns, sorted(rows, key=lambda row: float(row[1])))


def _passkeys(found: Summary | None) -> str:
    """Return the share of passkeys found and the answer's negative log-likelihood."""
    return f"{found.metrics['accuracy'].mean:.1f} ({found.metrics['gold_nll'].mean:.2f})" if found else ""


def table_of_bias(found: Mapping[str, Summary], metric: str, digits: int) -> str:
    """Return the table of a metric, one row per recipe that has all values of `bias_correction`."""
    rows = []
    for recipe in CORRECTED:
        each = [found.get(corrected(recipe, share)) for share in CORRECTED_SHARES]
        held = [summary for summary in each if summary is not None]
        if len(held) < len(each):
            continue
        cells = [f"{summary.metrics[metric].mean:.{digits}f}" for summary in held]
        least = min(cells, key=float)
        cells = [f"**{x}**" if x == least and len(set(cells)) > 1 else x for x in cells]
        if "accuracy" in held[0].metrics:
            shares = [f"{summary.metrics['accuracy'].mean:.1f}" for summary in held]
            cells = [f"{x} ({share})" for x, share in zip(cells, shares, strict=True)]
        rows.append([f"`{recipe}`", *cells])
    return markdown(("recipe", *CORRECTED_SHARES), rows)


def tables(study: str, found: Found, model: str) -> list[str]:
    """Return a study's tables."""
    if study == "recipes":
        return [table_of_methods(found, SMOLLM2 if model == "smollm2" else load_shape(model, with_weights=False)[0])]
    if study == "rivals":
        return [table_of_rivals(found)]
    return [table_of_bias(found.get(task, {}), metric, digits) for task, metric, digits in METRICS]


def main(given: list[str] | None = None) -> None:
    """Parse the options; run, and print the tables."""
    options = parser(__doc__)
    options.add_argument("study", choices=TASKS)
    add_models(options)
    options.add_argument("--text", default="pydoc", help="text for the divergence task")
    options.add_argument("--calibration", type=Path, help="folder of calibrations")
    options.add_argument("--out", type=Path, help="run, and write records to this folder")
    options.add_argument("--records", type=Path, nargs="+", help="records to print the tables of")
    args = options.parse_args(given)
    if args.out is None and args.records is None:
        options.error("give --out to run, or --records to print the tables")
    if args.out is not None:
        run(args)
    for model in args.model or ["smollm2"]:
        print("\n\n".join(tables(args.study, summaries(args.records or [args.out], model), model)))


if __name__ == "__main__":
    main()
