"""Methods side by side on a small model: tables of `tersekv eval divergence`, `passkey` and others.

    python benchmarks/studies.py recipes --text test.txt --calibration DIR --out DIR     # run, or continue.
    python benchmarks/studies.py recipes --records FILE… --into docs/all-recipes.md      # write its tables.

Studies: `recipes`, all methods (docs/all-recipes.md); `rivals`, OSCAR and KVarN beside others
(docs/methods/oscar.md, kvarn.md); `bias`, correction of packed tokens' softmax weights
(docs/bias-correction.md).

KL divergence: 2,048 tokens are packed after one exact prefill, and the next 256 are read 64 at a
time. Other tasks: the text is packed before the question is read. `recipes` needs calibrations of
`kvquant` and `trellis`, and `rivals` of `oscar`: `tersekv calibrate --recipe oscar --recipe
oscar:rotation=head`. Decoding speeds are those of `tersekv bench generate`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from recorded import add_models, fill, markdown, parser
from tersekv import cli
from tersekv.hf.facts import load_shape
from tersekv.lab.evals.harness import Summary
from tersekv.lab.evals.reader import FULL
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.plots.decodings import Setting, read_decodings
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
RIVALS = {
    f"{bits} bits": (
        *(TRELLIS.format(bits), f"kvarn:bits={bits}", f"oscar:bits={bits}"),
        *(f"turboquant:bits={bits}", f"turboquant:bits={bits + 0.5}", f"kivi:bits={bits}"),
    )
    for bits in (2, 3)
} | {
    "windows": WINDOWS,
    "kvarn": (
        *("kvarn:bits=2", "kvarn:bits=2,steps=0", "kvarn:bits=2,tile=64", "kvarn:bits=4/kvarn:bits=2"),
        "window:sinks=128,recent=128+kvarn:bits=2",
    ),
    "oscar": (
        *("oscar:bits=2", "oscar:bits=2,rotation=head", "oscar:bits=2,calibration=prompt"),
        *("oscar:bits=2,key_clip=1,value_clip=1", "window:sinks=64,recent=256+oscar:bits=2", "oscar:bits=3"),
    ),
}
"""Recipes of each table of the study `rivals`. `turboquant` has fewer true bits than `oscar`, and with half a bit
more also more. `kvarn` and `oscar` leave out or exchange a part."""
RETRIEVAL = (*RIVALS["2 bits"], *WINDOWS[:3], RIVALS["3 bits"][0])
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
SMOLLM2 = CacheShape((None,) * 30, 3, 64, 64, torch.bfloat16, (standard_rope(64, 100_000.0),) * 30)
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
        Task("divergence", (*DIVERGENCE, "4"), tuple(dict.fromkeys(map(written, itertools.chain(*RIVALS.values()))))),
        Task("passkey", ("--lengths", "2k", "--samples", "10"), tuple(dict.fromkeys(map(written, RETRIEVAL)))),
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


def table_of_methods(found: Found, args: argparse.Namespace, model: str) -> str:
    """Return a model's table of all methods, with a dash where records are missing."""
    shape = SMOLLM2 if model == "smollm2" else load_shape(model, with_weights=False)[0]
    near, far = found["divergence"], found.get("passkey", {})
    heading, rates = _rates(args.speeds, args.dtype)
    rows = []
    for name, summary in sorted(near.items(), key=lambda item: (item[0] != FULL, item[1].metrics["kl"].mean)):
        speed = f"{rates[name]:.1f}" if name in rates else "–"
        key = _estimate(far[name].metrics["accuracy"], 2) if name in far else "–"
        if name == FULL:
            rows.append(["full (bfloat16)", "16", "1", "0", key, f"{2 * shape.elements(LONG) / 1e6:.0f}", speed])
            continue
        ratio, kl = (_estimate(summary.metrics[m], n) for m, n in (("perplexity_ratio", 3), ("kl", 4)))
        held = predict(shape, Recipe.parse(name), LONG).total_bytes
        rows.append([f"`{name}`", f"{summary.bits_per_element:.2f}", ratio, kl, key, f"{held / 1e6:.0f}", speed])
    columns = ("recipe", "true bits", "perplexity", "divergence (nats)", "passkey at 4k", "MB at 32k", heading)
    return markdown(columns, rows)


def _estimate(found: Estimate, digits: int) -> str:
    return f"{found.mean:.{digits}f} ± {found.stderr:.{digits}f}" if found.stderr else f"{found.mean:.{digits}f}"


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


def table_of_rivals(recipes: tuple[str, ...], found: Found) -> str:
    """Return a table of the recipes whose divergence was measured. The column of passkeys is left out if no recipe
    looked for them."""
    near, far = found.get("divergence", {}), found.get("passkey", {})
    held = [recipe for recipe in recipes if written(recipe) in near]
    searched = any(written(recipe) in far for recipe in held)
    rows = []
    for recipe in held:
        metrics, bits = near[written(recipe)].metrics, predict(SMOLLM2, Recipe.parse(recipe), LONG).total_bytes * 8
        cells = [f"`{recipe}`", f"{bits / SMOLLM2.elements(LONG):.2f}", with_error(metrics["kl"], 4)]
        cells += [with_error(metrics["kl_p99"], 2), f"{metrics['top1_agreement'].mean:.3f}"]
        rows.append([*cells, *([_passkeys(far.get(written(recipe)))] if searched else [])])
    columns = ("recipe", "true bits at 32k", "KL, nats", "99th percentile", "top-1")
    return markdown((*columns, "passkey") if searched else columns, rows)


def with_error(found: Estimate, digits: int) -> str:
    """Return the mean with its standard error."""
    return f"{found.mean:.{digits}f} ± {found.stderr:.{digits}f}"


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


def tables(study: str, found: Found, args: argparse.Namespace, model: str) -> dict[str, Callable[[], str]]:
    """Return a study's tables by the name of their marks."""
    if study == "recipes":
        return {"recipes": partial(table_of_methods, found, args, model)}
    if study == "rivals":
        return {name: partial(table_of_rivals, recipes, found) for name, recipes in RIVALS.items()}
    return {task: partial(table_of_bias, found.get(task, {}), metric, digits) for task, metric, digits in METRICS}


def main(given: list[str] | None = None) -> None:
    """Parse the options; run, or write the tables."""
    options = parser(__doc__)
    options.add_argument("study", choices=TASKS)
    add_models(options)
    options.add_argument("--text", default="pydoc", help="text for the divergence task")
    options.add_argument("--calibration", type=Path, help="folder of calibrations")
    options.add_argument("--out", type=Path, help="run, and write records to this folder")
    options.add_argument("--records", type=Path, nargs="+", help="records to make the tables from")
    options.add_argument("--speeds", type=Path, help="records of `tersekv bench generate`")
    options.add_argument("--dtype", default="bfloat16", help="weight dtype of the quoted speeds")
    options.add_argument("--into", type=Path, nargs="+", default=[], help="pages whose tables are replaced")
    args = options.parse_args(given)
    models = args.model or ["smollm2"]
    if args.out is None and args.records is None:
        options.error("give --out to run, or --records to write the tables")
    if args.into and len(models) > 1:
        options.error("--into has room for the tables of one model: give one --model")
    if args.out is not None:
        run(args)
    for model in models:
        found = summaries(args.records or [args.out], model)
        fill(args.into, "studies.py", tables(args.study, found, args, model))


if __name__ == "__main__":
    main()
