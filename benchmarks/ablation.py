"""Ablation tables from records, for `trellis_tables.py`.

A table has a title and rows. A row is a recipe with its calibration and evaluation settings.
Calibrations and records stay in the folder, so a stopped run continues where it was. Tables are
made from records alone.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tersekv import cli
from tersekv.calibration.find import place
from tersekv.calibration.needs import needs_corpus
from tersekv.lab.evals.records import read
from tersekv.lab.evals.tasks import tasks
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.models.loading import load_config
from tersekv.recipe import Recipe

COLUMNS = {"perplexity": ("perplexity", ".2f"), "perplexity_ratio": ("ratio to full", ".3f"), "kl": ("KL", ".4f")}
COLUMNS["top1_agreement"] = ("top-1", ".3f")
MODE = "simulate"
"""Quantise every key and value in one forward pass."""
WITH_ERRORS = ("perplexity_ratio", "kl")


@dataclass(frozen=True)
class Setting:
    """Calibration and evaluation settings of a row. text: "train", or "other" for another corpus."""

    samples: int = 16
    length: int = 2048
    text: str = "train"
    sinks: int = 1

    @property
    def calibration(self) -> str:
        """Return the name of the calibration folder. It omits sinks, an option of the evaluation
        only."""
        return f"{self.text}-{self.samples}x{self.length}"


@dataclass(frozen=True)
class Row:
    """A row of a table: label, recipe and settings."""

    label: str
    recipe: str
    setting: Setting = Setting()


@dataclass(frozen=True)
class Study:
    """Tables by name, a note below each, and the evaluation task that fills them."""

    tables: dict[str, tuple[str, list[Row]]]
    notes: dict[str, str]
    task: str

    def run(self, args: argparse.Namespace, names: Sequence[str]) -> None:
        """Run missing calibrations, with one gradient pass per setting, then evaluate."""
        config = load_config(args.model)
        rows = [row for name in names for row in self.tables[name][1]]
        for setting in dict.fromkeys(row.setting for row in rows):
            recipes = list(dict.fromkeys(row.recipe for row in rows if row.setting == setting))
            folder = args.out / "calibrations" / setting.calibration
            learning = [r for r in recipes if needs_corpus(Recipe.parse(r), config)]
            _calibrate([r for r in learning if not place(folder, Recipe.parse(r)).exists()], setting, folder, args)
            named = [part for recipe in recipes for part in ("-r", recipe)]
            window = ("--windows", str(args.windows), "--context", str(args.context))
            mode = ("--mode", MODE, "--sinks", str(setting.sinks))
            where = ("--calibration", str(folder)) if learning else ()
            out = ("--out", str(records_folder(args.out, setting)))
            program("eval", self.task, "-m", args.model, *named, "--text", args.test, *window, *mode, *where, *out)

    def written(self, name: str, args: argparse.Namespace) -> str:
        """Return one table in markdown.

        Errors are standard errors over windows; for ratios and divergences, of differences to the
        full cache.
        """
        title, rows = self.tables[name]
        found = [self.summary(row, args) for row in rows]
        columns = [c for c in COLUMNS if any(one is not None and c in one[0] for one in found)]
        lines = [f"### {f'Table {name}: ' if name.isdecimal() else ''}{title}", ""]
        lines.append("| | " + " | ".join([*(COLUMNS[c][0] for c in columns), "true bits"]) + " |")
        lines.append("|---" * (len(columns) + 2) + "|")
        for row, one in zip(rows, found, strict=True):
            cells = ["–"] * (len(columns) + 1) if one is None else [_cell(c, one[0][c]) for c in columns]
            cells += [] if one is None else [f"{one[1]:.2f}"]
            lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
        return "\n".join([*lines, "", self.notes[name]])

    def summary(self, row: Row, args: argparse.Namespace) -> tuple[dict[str, Estimate], float] | None:
        """Return a row's metrics and bits per element from records, or None if records are missing."""
        try:
            records = read(records_folder(args.out, row.setting))
        except ValueError:
            return None
        asked = {"context": args.context, "mode": MODE, "sinks": row.setting.sinks, "text": args.test}
        ours = [r for r in records if asked.items() <= r["options"].items() and r["model"] == args.model]

        def of(recipe: str) -> list[dict[str, Any]]:
            by_window = {int(r["sample"].split("-")[0]): r for r in ours if r["recipe"] == recipe}
            return [by_window[i] for i in range(args.windows) if i in by_window]

        full, packed = of("full"), of(str(Recipe.parse(row.recipe)))
        if len(packed) < args.windows or [r["sample"] for r in full] != [r["sample"] for r in packed]:
            return None
        task = tasks()[self.task]()
        metrics = task.summarise([r["metrics"] for r in packed], [r["metrics"] for r in full])
        return metrics, sum(r["bits_per_element"] for r in packed) / len(packed)

    def main(self, doc: str | None) -> None:
        """Parse the options, run the study and print its tables."""
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--train", default="pydoc", help="text to calibrate on")
        parser.add_argument("--other", default="pydoc", help="second text to calibrate on")
        parser.add_argument("--test", required=True, help="text to evaluate on")
        parser.add_argument("--out", type=Path, required=True, help="folder of calibrations and records")
        parser.add_argument("--model", default="smollm2")
        parser.add_argument("--tables", default="", help=f"tables to make, from {', '.join(self.tables)}; default: all")
        parser.add_argument("--windows", type=int, default=4)
        parser.add_argument("--context", type=int, default=2048)
        parser.add_argument("--workers", type=int, default=1, help="number of processes that fit codebooks")
        parser.add_argument("--print", action="store_true", help="print tables from existing records, run nothing")
        args = parser.parse_args()
        names = args.tables.split(",") if args.tables else list(self.tables)
        if unknown := [name for name in names if name not in self.tables]:
            parser.error(f"unknown table {', '.join(unknown)}; choose from {', '.join(self.tables)}")
        if not args.print:
            self.run(args, names)
        for name in names:
            print(f"\n{self.written(name, args)}")


def _calibrate(recipes: Sequence[str], setting: Setting, folder: Path, args: argparse.Namespace) -> None:
    if not recipes:
        return
    named = [part for recipe in recipes for part in ("-r", recipe)]
    size = ("--samples", str(setting.samples), "--length", str(setting.length), "--seed", "0")
    text = args.train if setting.text == "train" else args.other
    workers = ("--workers", str(args.workers))
    program("calibrate", "-m", args.model, *named, *size, *workers, "--text", text, "--out", str(folder))


def program(*arguments: str) -> None:
    """Run the program `tersekv` and exit if it fails."""
    status = cli.run(list(arguments))
    if status:
        sys.exit(status)


def records_folder(out: Path, setting: Setting) -> Path:
    """Return the folder of one setting's records. It omits sinks, which the records contain."""
    return out / "records" / setting.calibration


def _cell(column: str, estimate: Estimate) -> str:
    text = format(estimate.mean, COLUMNS[column][1])
    if column not in WITH_ERRORS or math.isnan(estimate.stderr):  # undefined for one window
        return text
    return f"{text} ± {format(estimate.stderr, COLUMNS[column][1])}"
