"""OSCAR and KVarN beside other methods: the tables of docs/methods/oscar.md and kvarn.md.

    python benchmarks/rivals.py --text test.txt --calibration DIR --out DIR      # run, or continue.
    python benchmarks/rivals.py --records FILE --into docs/methods/oscar.md      # write the tables.

KL divergence: 2,048 tokens are packed after one exact prefill, and the next 256 are read 64 at a
time. Passkey: the text is packed before the question is read. `oscar` needs its calibrations:
`tersekv calibrate --recipe oscar --recipe oscar:rotation=head`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from tersekv import cli
from tersekv.lab.evals.harness import Summary
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.plots.groups import grouped, read_records
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict
from tersekv.transforms.rope import standard_rope

RATES = {
    bits: (
        f"trellis:bits={bits},calibration=prompt",
        f"kvarn:bits={bits}",
        f"oscar:bits={bits}",
        f"turboquant:bits={bits}",
        f"turboquant:bits={bits + 0.5}",
        f"kivi:bits={bits}",
    )
    for bits in (2, 3)
}
"""Recipes by rate. `turboquant` has fewer true bits than `oscar`, and with half a bit more also more."""
WINDOWS = (
    *("window:sinks=128,recent=128+kvarn:bits=2", "window:sinks=64,recent=256+oscar:bits=2"),
    "window:sinks=128,recent=128+kvarn:bits=4/kvarn:bits=2",
    "window:sinks=64,recent=256+trellis:bits=2,calibration=prompt",
)
"""Recipes with the published windows and rates."""
PARTS = {
    "kvarn": (
        *("kvarn:bits=2", "kvarn:bits=2,steps=0", "kvarn:bits=2,tile=64", "kvarn:bits=4/kvarn:bits=2"),
        "window:sinks=128,recent=128+kvarn:bits=2",
    ),
    "oscar": (
        *("oscar:bits=2", "oscar:bits=2,rotation=head", "oscar:bits=2,calibration=prompt"),
        *("oscar:bits=2,key_clip=1,value_clip=1", "window:sinks=64,recent=256+oscar:bits=2", "oscar:bits=3"),
    ),
}
"""Recipes with a part left out or exchanged."""
TABLES = {**{f"{bits} bits": recipes for bits, recipes in RATES.items()}, "windows": WINDOWS, **PARTS}
RETRIEVAL = (*RATES[2], *WINDOWS[:3], RATES[3][0])
"""Recipes that look for passkeys."""
DIVERGENCE = ("--mode", "cache", "--context", "2304", "--prefix", "2048", "--chunk", "64", "--windows", "4")
PASSKEY = ("--lengths", "2k", "--samples", "10")
SMOLLM2 = CacheShape((None,) * 30, 3, 64, 64, torch.bfloat16, (standard_rope(64, 100_000.0),) * 30)
LONG = 32 * 1024
BEGIN, END = "<!-- {}: made by benchmarks/rivals.py -->", "<!-- end of {} -->"


def written(recipe: str) -> str:
    """Return the recipe as records name it."""
    return str(Recipe.parse(recipe))


def run(text: str, calibration: Path, out: Path) -> None:
    """Evaluate every recipe, except results that the folder already has."""
    recipes = dict.fromkeys(written(recipe) for some in TABLES.values() for recipe in some)
    far = dict.fromkeys(written(recipe) for recipe in RETRIEVAL)
    for task, some in ((("divergence", "--text", text, *DIVERGENCE), recipes), (("passkey", *PASSKEY), far)):
        each = [part for recipe in some for part in ("--recipe", recipe)]
        more = ("--model", "smollm2", "--calibration", str(calibration), "--out", str(out))
        if status := cli.run(["eval", *task, *each, *more]):
            sys.exit(status)


def long_bits(recipe: str) -> float:
    """Return the true bits per element that a bfloat16 model's cache takes at 32,768 tokens."""
    return predict(SMOLLM2, Recipe.parse(recipe), LONG).total_bytes * 8 / SMOLLM2.elements(LONG)


def table(recipes: tuple[str, ...], near: dict[str, Summary], far: dict[str, Summary]) -> str:
    """Return one table in markdown, of the recipes whose divergence was measured.

    near, far: summaries of the divergence and of the passkey by recipe as written. The column of
    passkeys is left out if no recipe looked for them.
    """
    held = [recipe for recipe in recipes if written(recipe) in near]
    searched = any(written(recipe) in far for recipe in held)
    names = ["recipe", "true bits at 32k", "KL, nats", "99th percentile", "top-1", *(["passkey"] if searched else [])]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for recipe in held:
        metrics = near[written(recipe)].metrics
        cells = [f"`{recipe}`", f"{long_bits(recipe):.2f}"]
        cells += [f"{estimate(metrics['kl'], 4)}", f"{estimate(metrics['kl_p99'], 2)}"]
        cells.append(f"{metrics['top1_agreement'].mean:.3f}")
        if searched:
            cells.append(passkeys(far.get(written(recipe))))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def estimate(found: Estimate, digits: int) -> str:
    """Return the mean with its standard error."""
    return f"{found.mean:.{digits}f} ± {found.stderr:.{digits}f}"


def passkeys(found: Summary | None) -> str:
    """Return the share of passkeys found and the answer's negative log-likelihood."""
    if found is None:
        return ""
    return f"{found.metrics['accuracy'].mean:.1f} ({found.metrics['gold_nll'].mean:.2f})"


def filled(text: str, records: list[Path]) -> str:
    """Return the page with those of its tables that it has markers for made from the records."""
    found = {group.name: {s.recipe: s for s in group.summaries} for group in grouped(read_records(records))}
    for name, recipes in TABLES.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin not in text:
            continue
        before, rest = text.split(begin)
        made = table(recipes, found.get("divergence", {}), found.get("passkey", {}))
        text = f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    """Parse the options; run, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="pydoc", help="text for the divergence task")
    parser.add_argument("--calibration", type=Path, help="folder of oscar's calibrations")
    parser.add_argument("--out", type=Path, help="run, and write records to this folder")
    parser.add_argument("--records", type=Path, nargs="+", help="records to make the tables from")
    parser.add_argument("--into", type=Path, help="file whose tables are replaced; default: print them")
    args = parser.parse_args()
    if args.out is None and args.records is None:
        parser.error("give --out to run, or --records to write the tables")
    if args.out is not None:
        if args.calibration is None:
            parser.error("--out needs --calibration, the folder of oscar's calibrations")
        run(args.text, args.calibration, args.out)
    records = args.records or [args.out]
    if args.into is None:
        print(filled("".join(f"{BEGIN.format(name)}{END.format(name)}\n" for name in TABLES), records))
    else:
        args.into.write_text(filled(args.into.read_text(encoding="utf-8"), records), encoding="utf-8")


if __name__ == "__main__":
    main()
