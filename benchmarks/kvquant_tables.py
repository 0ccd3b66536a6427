"""KVQuant's ablations (arXiv 2401.18079) on a small model: calibrate, evaluate, and write the tables in markdown.

    python benchmarks/kvquant_tables.py --train train.txt --test test.txt --out folder    # all; takes hours
    python benchmarks/kvquant_tables.py … --tables 9,10 --windows 2                               # some

The texts are wikitext-2's train and test rows joined by two newlines. Perplexity is of `simulate` with one sink unless
the table is about that. Calibrations and records stay in the folder: a run that was stopped goes on where it was, and
tables are made from records alone. `--print` makes them from what is there, without running anything.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tersekv import cli
from tersekv.evals.records import read
from tersekv.evals.tasks.base import Estimate
from tersekv.evals.tasks.perplexity import Perplexity
from tersekv.hf.calibration import needs_corpus, place
from tersekv.hf.models import load_config
from tersekv.recipe import Recipe

BITS = (4, 3, 2)
PAPER = {
    "9": "LLaMA-7B, 3 bits: per token 10.87, keys per channel 3.82 less; values per channel are worse than per token.",
    "10": "LLaMA-7B, 3 bits: before RoPE 0.82 less than after.",
    "11": "nuq below nf by up to 0.33, and below k-means without weights or without s².",
    "12": "LLaMA-7B, 3 bits: 1 % per vector takes off another 0.19, less than 0.1 over fp16 then; per matrix is worse.",
    "13": "first token exact helps at all bits, most at few bits and without outliers.",
    "14": "offline a little worse without outliers, the same with 1 % apart.",
    "17": "nuq mostly beats int and nf, with and without groups; 0.1 to 1 % outliers help further. LLaMA-7B at 4, 3, 2 "
    "bits (Table 18; fp16 5.68): int 5.98 / 10.87 / 11779, nf 5.87 / 7.33 / 3210, nuq 5.72 / 5.87 / 7.23, nuq with 1 % "
    "5.69 / 5.75 / 6.01.",
    "20": "keys per token are better after RoPE than before.",
    "21": "much the same, whichever corpus.",
    "q_norm": "helps at 2 bits; 3 and 4 bits need none.",
    "samples": "not in the paper.",
}
"""What its text says about each table; perplexity of wikitext-2."""
SHARES = ("0", "0.001", "0.005", "0.01")


@dataclass(frozen=True)
class Setting:
    """How a row is calibrated and evaluated. text: "train", or "other" as another corpus."""

    samples: int = 16
    length: int = 2048
    text: str = "train"
    sinks: int = 1

    @property
    def calibration(self) -> str:
        """Folder of its calibrations; sinks are an option of the evaluation only."""
        return f"{self.text}-{self.samples}x{self.length}"


@dataclass(frozen=True)
class Row:
    """A line of a table: a label, a recipe, and how it is calibrated and evaluated."""

    label: str
    recipe: str
    setting: Setting = Setting()


def tables() -> dict[str, tuple[str, list[Row]]]:
    """Every table by its number in the paper: a title and rows."""
    made: dict[str, tuple[str, list[Row]]] = {}
    axes = [("per token, after RoPE", "axis=token,pre_rope=false"), ("per channel, after RoPE", "pre_rope=false")]
    made["9"] = (
        "Keys per token and per channel",
        [
            Row(f"{b} bits, keys {label}", f"kvquant:bits={b},{o},outliers=0,table=int")
            for b in BITS
            for label, o in axes
        ],
    )
    ropes = [("after RoPE", ",pre_rope=false"), ("before RoPE", "")]
    made["10"] = (
        "Keys before and after RoPE",
        [Row(f"{b} bits, {label}", f"kvquant:bits={b},outliers=0,table=int{o}") for b in BITS for label, o in ropes],
    )
    kinds = [
        *(("int", "table=int"), ("nf", "table=nf"), ("nuq, no weights", "weights=none")),
        *(("nuq, Fisher", "weights=fisher"), ("nuq, Fisher × s²", "weights=eq7")),
    ]
    made["11"] = (
        "Tables and weights",
        [Row(f"{b} bits, {label}", f"kvquant:bits={b},outliers=0,{o}") for b in BITS for label, o in kinds],
    )
    pers = [("per matrix", ",outliers_per=matrix"), ("per vector", "")]
    made["12"] = (
        "Outliers per matrix and per vector",
        [Row(f"{b} bits, 1 % {label}", f"kvquant:bits={b}{o}") for b in BITS for label, o in pers],
    )
    made["13"] = (
        "First token exact",
        [
            Row(f"{b} bits, {100 * float(s):g} %, {n} sinks", f"kvquant:bits={b},outliers={s}", Setting(sinks=n))
            for b in BITS
            for s in ("0", "0.01")
            for n in (0, 1)
        ],
    )
    ranges = [("offline", ""), ("online", ",ranges=online")]
    made["14"] = (
        "Ranges of keys offline and online",
        [Row(f"{b} bits, 1 %, {label}", f"kvquant:bits={b}{o}") for b in BITS for label, o in ranges],
    )
    made["17"] = (
        "Tables × outliers × bits, and integers and normal quantiles in groups of 64",
        [
            row
            for b in BITS
            for row in (
                *(
                    Row(f"{t}{b}, {100 * float(s):g} %", f"kvquant:bits={b},outliers={s},table={t}")
                    for t in ("int", "nf", "nuq")
                    for s in SHARES
                ),
                Row(f"int{b}, groups of 64 along the token", f"uniform:bits={b},group=64"),
                Row(f"nf{b}, groups of 64 along the token", f"normalfloat:bits={b},group=64,zero_point=true"),
            )
        ],
    )
    axes = [("after RoPE", "pre_rope=false"), ("before RoPE", "pre_rope=true")]
    made["20"] = (
        "Keys per token, before and after RoPE",
        [
            Row(f"{b} bits, keys per token {label}", f"kvquant:bits={b},axis=token,{o},outliers=0,table=int")
            for b in BITS
            for label, o in axes
        ],
    )
    made["21"] = (
        "Corpus of calibration",
        [
            Row(f"{b} bits, 1 %, {text}", f"kvquant:bits={b}", Setting(text=text))
            for b in BITS
            for text in ("train", "other")
        ],
    )
    norms = [("", ""), (", Q-Norm", ",q_norm=true")]
    made["q_norm"] = (
        "Q-Norm (§3.6)",
        [Row(f"{b} bits, 1 %{label}", f"kvquant:bits={b}{o}") for b in BITS for label, o in norms],
    )
    made["samples"] = (
        "Samples of calibration (ours)",
        [Row(f"{b} bits, 1 %, {n} × 2,048", f"kvquant:bits={b}", Setting(n)) for b in BITS for n in (1, 4, 16)],
    )
    return made


def program(*arguments: str) -> None:
    """Run the program `tersekv`; leave where it fails."""
    status = cli.run(list(arguments))
    if status:
        sys.exit(status)


def measure(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Calibrate what is missing, one gradient pass for each setting, then evaluate."""
    config = load_config(args.model)
    for setting in dict.fromkeys(row.setting for row in rows):
        recipes = list(dict.fromkeys(row.recipe for row in rows if row.setting == setting))
        folder = args.out / "calibrations" / setting.calibration
        learning = [r for r in recipes if needs_corpus(Recipe.parse(r), config)]
        missing = [r for r in learning if not place(folder, Recipe.parse(r)).exists()]
        named = [part for recipe in missing for part in ("-r", recipe)]
        size = ("--samples", str(setting.samples), "--length", str(setting.length), "--seed", "0")
        if missing:
            text = args.train if setting.text == "train" else args.other
            workers = ("--workers", str(args.workers))
            program("calibrate", "-m", args.model, *named, *size, *workers, "--text", text, "--out", str(folder))
        named = [part for recipe in recipes for part in ("-r", recipe)]
        window = ("--windows", str(args.windows), "--context", str(args.context), "--sinks", str(setting.sinks))
        where = ("--calibration", str(folder), "--out", str(records_folder(args.out, setting)))
        program("eval", "perplexity", "-m", args.model, *named, "--text", args.test, *window, *where)


def records_folder(out: Path, setting: Setting) -> Path:
    """Records of one setting; sinks are in the records themselves."""
    return out / "records" / setting.calibration


def written(title: str, rows: Sequence[Row], args: argparse.Namespace) -> str:
    """One table in markdown: perplexity, its ratio to the full cache's on the same windows, and true bits."""
    lines = [f"### {title}", "", "| | perplexity | ratio to full | true bits |", "|---|---|---|---|"]
    for row in rows:
        found = summary(row, args)
        if found is None:
            lines.append(f"| {row.label} | – | – | – |")
            continue
        nll, bits = found
        ratio = f"{nll['perplexity_ratio'].mean:.3f} ± {nll['perplexity_ratio'].stderr:.3f}"
        lines.append(f"| {row.label} | {nll['perplexity'].mean:.2f} | {ratio} | {bits:.2f} |")
    return "\n".join(lines)


def summary(row: Row, args: argparse.Namespace) -> tuple[dict[str, Estimate], float] | None:
    """Metrics and bits per element of a row, from records; None where they are not all there."""
    try:
        records = read(records_folder(args.out, row.setting))
    except ValueError:
        return None
    asked = {"context": args.context, "sinks": row.setting.sinks, "text": args.test}
    asked_for = [r for r in records if asked.items() <= r["options"].items() and r["model"] == args.model]

    def of(recipe: str) -> list[dict[str, Any]]:
        found = {int(r["sample"].split("-")[0]): r for r in asked_for if r["recipe"] == recipe}
        return [found[i] for i in range(args.windows) if i in found]

    full, packed = of("full"), of(str(Recipe.parse(row.recipe)))
    if len(packed) < args.windows or [r["sample"] for r in full] != [r["sample"] for r in packed]:
        return None
    metrics = Perplexity().summarise([r["metrics"] for r in packed], [r["metrics"] for r in full])
    return metrics, sum(r["bits_per_element"] for r in packed) / len(packed)


def main() -> None:
    """Read the options, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default="pydoc", help="text to calibrate on")
    parser.add_argument("--other", default="pydoc", help="text of another kind to calibrate on, for Table 21")
    parser.add_argument("--test", required=True, help="text to evaluate on")
    parser.add_argument("--out", type=Path, required=True, help="folder of calibrations and records")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tables", default="", help=f"of {', '.join(tables())}; all without it")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=1, help="processes that fit tables")
    parser.add_argument("--print", action="store_true", help="run nothing")
    args = parser.parse_args()
    known = tables()
    names = args.tables.split(",") if args.tables else list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no table {', '.join(unknown)}; there are {', '.join(known)}")
    if not args.print:
        measure([row for name in names for row in known[name][1]], args)
    for name in names:
        title, rows = known[name]
        said = written(f"{f'Table {name}' if name.isdecimal() else 'Beside them'}: {title}", rows, args)
        print(f"\n{said}\n\nPaper: {PAPER[name]}")


if __name__ == "__main__":
    main()
