"""Codec `trellis`: ablation, comparison with other methods at its bits, and calibration on different texts.

    python benchmarks/trellis.py tables --train train.txt --other c4.txt --test test.txt --out DIR    # all; hours.
    python benchmarks/trellis.py tables … --tables keys,values --windows 2                            # some.
    python benchmarks/trellis.py tables … --print                                         # from existing records.
    python benchmarks/trellis.py texts --out DIR --text wikitext=test.txt --text c4=c4.txt \\
        --corpus "wikitext (train)=train.txt"                    # run, or continue a stopped run.
    python benchmarks/trellis.py texts --out DIR --record        # keep the results as records.

`tables`: each evaluation is one forward pass in which attention sees every key and value quantised
(`simulate`), with four exact sinks. The texts are wikitext-2's train rows for fitting, another
corpus for comparison, and wikitext-2's test rows, joined by two newlines. Calibrations and records
stay in the folder, so a stopped run continues where it was. Tables are made from records alone.

`texts`: the divergence that each calibration text gives on others. The model's own text, Python's
documentation (pydoc) and random tokens are always among the sources. So is the prompt itself, without
calibration. Divergence is measured as for the README.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recorded import RECORDS as FOLDER
from recorded import markdown, parser, record
from tersekv import cli
from tersekv.calibration.calibrate import Calibrator, Corpus
from tersekv.calibration.find import place
from tersekv.calibration.needs import needs_corpus
from tersekv.calibration.own_text import NAME as OWN
from tersekv.calibration.own_text import own_text
from tersekv.calibration.text import pydoc_text
from tersekv.errors import UserError
from tersekv.lab.evals.harness import Harness
from tersekv.lab.evals.options import build
from tersekv.lab.evals.records import Records, read
from tersekv.lab.evals.tasks import tasks
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.models.loading import load, load_config
from tersekv.recipe import Recipe

COLUMNS = {"perplexity": ("perplexity", ".2f"), "perplexity_ratio": ("ratio to full", ".3f"), "kl": ("KL", ".4f")}
COLUMNS["top1_agreement"] = ("top-1", ".3f")
TASK, MODE = "divergence", "simulate"
"""Quantise every key and value in one forward pass."""
WITH_ERRORS = ("perplexity_ratio", "kl")


PROMPT, RANDOM, PYDOC = "the prompt", "random tokens", "pydoc"
RECORDS = FOLDER / "calibration_texts.jsonl"
CONTEXT = {"mode": "cache", "context": "2304", "prefix": "2048", "chunk": "64"}


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


FITTED = Setting(sinks=4)
OTHER = Setting(sinks=4, text="other")
RATES = ("1.5", "2.1", "2.6", "3.1", "3.6", "4.1")
STEPS = (
    ("rotation and scalar codes", "allot=layer,basis=rotation,centre=false,code=scalar,metric=none"),
    ("… centred", "allot=layer,basis=rotation,code=scalar,metric=none"),
    ("… and the channels' own basis, bits water-filled", "allot=layer,basis=channels,code=scalar,metric=none"),
    ("… and the KLT's", "allot=layer,code=scalar,metric=none"),
    ("… in the metric of the loss", "allot=layer,code=scalar"),
    ("… and trellis codes", "allot=layer"),
    ("… and bits allocated over layers and sides: all", ""),
    ("all, without centring", "centre=false"),
    ("all, without the metric", "metric=none"),
    ("all, in the channels' own basis", "basis=channels"),
    ("all, in a random basis", "basis=rotation"),
)
OTHERS = (
    *(f"turboquant:bits={b}" for b in ("2", "2.5", "3", "3.5", "4")),
    *(f"kivi:bits={b}" for b in (2, 3, 4)),
    "polarquant",
    "qjl",
    *(f"kvquant:bits={b}" for b in (2, 3, 4)),
)


ORDER = (("after", ""), ("before", "pre_rope=true"))
NOTES = {
    "keys": "Values stay float32; true bits are of keys and values together.",
    "values": "Keys stay float32; true bits are of keys and values together.",
    "both": "",
    "rope": "Before RoPE the query cannot absorb the basis, so no kernel reads this variant.",
    "rates": "",
    "fits": "A fit on the prompt has no gradients; means, bases and scales are those of this sequence only.",
    "others": "",
}


def trellis(bits: str, options: str) -> str:
    """Return a recipe's trellis part."""
    return f"trellis:bits={bits}" + (f",{options}" if options else "")


def all_tables() -> dict[str, tuple[str, list[Row]]]:
    """Return every table by name."""
    made = {}
    for side, recipe in (("keys", "{0}/exact:dtype=fp32"), ("values", "exact:dtype=fp32/{0}"), ("both", "{0}")):
        made[side] = (
            f"Ingredients, {side}" + ("" if side == "both" else " alone"),
            [Row(f"{b} bits: {label}", recipe.format(trellis(b, o)), FITTED) for b in ("2", "3") for label, o in STEPS],
        )
    made["rope"] = (
        "Keys decorrelated after and before RoPE",
        [Row(f"{b} bits, {w} RoPE", trellis(b, o), FITTED) for b in ("2", "3") for w, o in ORDER],
    )
    made["rates"] = ("Bits", [Row(f"{b} bits", trellis(b, ""), FITTED) for b in RATES])
    made["fits"] = (
        "Calibration data",
        [
            row
            for b in ("2", "3")
            for row in (
                Row(f"{b} bits, wikitext-2 train", trellis(b, ""), FITTED),
                Row(f"{b} bits, another corpus", trellis(b, ""), OTHER),
                Row(f"{b} bits, the prompt", trellis(b, "calibration=prompt"), FITTED),
            )
        ],
    )
    made["others"] = ("Other methods", [Row(f"`{recipe}`", recipe, FITTED) for recipe in OTHERS])
    return made


def run_tables(args: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Run missing calibrations, with one gradient pass per setting, then evaluate."""
    config = load_config(args.model)
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
        program("eval", TASK, "-m", args.model, *named, "--text", args.test, *window, *mode, *where, *out)


def written(title: str, rows: Sequence[Row], note: str, args: argparse.Namespace) -> str:
    """Return one table in markdown, with its title."""
    columns = ("recipe", *(name for name, _ in COLUMNS.values()), "true bits")
    made = markdown(columns, [[row.label, *cells(row, args)] for row in rows])
    return "\n".join([f"### {title}", "", made, "", note])


def cells(row: Row, args: argparse.Namespace) -> list[str]:
    """Return a row's metrics and its true bits; dashes without records.

    Errors are standard errors over windows; for ratios and divergences, of differences to the full cache.
    """
    found = summary(row, args)
    if found is None:
        return ["–"] * (len(COLUMNS) + 1)
    return [*(_cell(column, found[0][column]) for column in COLUMNS), f"{found[1]:.2f}"]


def summary(row: Row, args: argparse.Namespace) -> tuple[dict[str, Estimate], float] | None:
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
    task = tasks()[TASK]()
    metrics = task.summarise([r["metrics"] for r in packed], [r["metrics"] for r in full])
    return metrics, sum(r["bits_per_element"] for r in packed) / len(packed)


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


def corpora(
    model: Any, tokenizer: Any, files: dict[str, Path], shape: tuple[int, int]
) -> dict[str, Callable[[], Corpus]]:
    """Return the texts to calibrate on by name, as functions that draw samples of `shape`."""

    def drawn(name: str, read: Callable[[], str]) -> Corpus:
        return Corpus.draw(name, read(), tokenizer(read(), verbose=False)["input_ids"], *shape, seed=0)

    def made(name: str, ids: Tensor) -> Corpus:
        return Corpus(name, hashlib.sha256(ids.numpy().tobytes()).hexdigest(), ids, 0)

    chance = torch.Generator().manual_seed(0)
    return {
        PYDOC: partial(drawn, PYDOC, pydoc_text),
        **{name: partial(drawn, name, partial(path.read_text, encoding="utf-8")) for name, path in files.items()},
        RANDOM: lambda: made(RANDOM, torch.randint(model.config.vocab_size, shape, generator=chance)),
        OWN: lambda: made(OWN, own_text(model, *shape)),
    }


def run_texts(args: argparse.Namespace, bits: list[float], texts: dict[str, Path]) -> list[dict[str, Any]]:
    """Calibrate, evaluate and return results; whatever the folder has is kept."""
    model, tokenizer = load(args.model)
    shape = args.samples, args.length
    recipes = [f"trellis:bits={b:g}" for b in bits]
    folders: dict[str, Path | None] = {PROMPT: None}
    made = args.out / f"{args.samples}x{args.length}"
    for name, corpus in corpora(model, tokenizer, dict(pairs(args.corpus)), shape).items():
        folders[name] = folder = made / hashlib.sha256(name.encode()).hexdigest()[:8]
        path = place(folder, Recipe.parse(recipes[0]))
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            calibrator = Calibrator(model, [Recipe.parse(recipes[0])], corpus(), work=made / "work")
            calibrator.run()[0].save(path)
            calibrator.clean()
            print(f"calibrated on {name}", flush=True)
    found: list[dict[str, Any]] = []
    for source, calibration in folders.items():
        if args.source and source not in args.source:
            continue
        names = [f"{name},calibration=prompt" for name in recipes] if calibration is None else recipes
        harness = Harness(model, tokenizer, args.model, names, calibration)
        for text, path in texts.items():
            options = CONTEXT | {"text": str(path), "windows": str(args.windows)}
            with Records(args.out / "records") as records:
                summaries = harness.run(build(["divergence"], options), records)
            for b, summary in zip(bits, summaries[1:], strict=True):
                kl = summary.metrics["kl"]
                line = {"source": source, "shape": list(shape), "text": text, "bits": b, "kl": kl.mean}
                line |= {"stderr": kl.stderr, "windows": summary.samples, "true_bits": summary.bits_per_element}
                found.append(line)
                print(json.dumps(found[-1]), flush=True)
    return found


def table_of_texts(lines: list[dict[str, Any]]) -> str:
    """Return the table in Markdown: a row per source and number of bits, a column per text."""
    texts = list(dict.fromkeys(line["text"] for line in lines))
    sources = list(dict.fromkeys((line["source"], tuple(line["shape"]), line["bits"]) for line in lines))
    cells = {
        ((line["source"], tuple(line["shape"]), line["bits"]), line["text"]): f"{line['kl']:.4f} ± {line['stderr']:.4f}"
        for line in lines
    }
    rows = []
    for key in sorted(sources, key=lambda key: key[2]):
        name, (samples, length), bits = key
        size = "" if name == PROMPT else f"{samples} × {length:,}"
        rows.append([name, size, f"{bits:g}", *(cells.get((key, text), "–") for text in texts)])
    return markdown(("calibrated on", "tokens", "bits", *texts), rows)


def pairs(options: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield name and file of options NAME=FILE.

    Raises:
        UserError: an option has another form, or the file does not exist.
    """
    for option in options:
        name, _, path = option.partition("=")
        if not path or not Path(path).is_file():
            raise UserError(f"{option!r} is not NAME=FILE with a file that exists")
        yield name, Path(path)


def tables_command(args: argparse.Namespace) -> None:
    """Run the evaluations of tables and print them."""
    every = all_tables()
    names = args.tables.split(",") if args.tables else list(every)
    if unknown := [name for name in names if name not in every]:
        raise SystemExit(f"unknown table {', '.join(unknown)}; choose from {', '.join(every)}")
    if not args.print:
        run_tables(args, [row for name in names for row in every[name][1]])
    for name in names:
        print(f"\n{written(*every[name], NOTES[name], args)}")


def texts_command(args: argparse.Namespace) -> None:
    """Run, print the table, and keep the results if asked to."""
    found = run_texts(args, [float(b) for b in args.bits.split(",")], dict(pairs(args.text)))
    print(table_of_texts(found))
    record(RECORDS if args.record else None, {"model": args.model}, found)


def main() -> None:
    """Parse the options and run the command."""
    options = parser(__doc__)
    commands = options.add_subparsers(required=True)
    one = commands.add_parser("tables", help="ablation, and other methods")
    one.add_argument("--train", default="pydoc", help="text to calibrate on")
    one.add_argument("--other", default="pydoc", help="second text to calibrate on")
    one.add_argument("--test", required=True, help="text to evaluate on")
    one.add_argument("--out", type=Path, required=True, help="folder of calibrations and records")
    one.add_argument("--tables", default="", help=f"tables to make, from {', '.join(NOTES)}; default: all")
    one.add_argument("--context", type=int, default=2048)
    one.add_argument("--workers", type=int, default=1, help="number of processes that fit codebooks")
    one.add_argument("--print", action="store_true", help="print tables from existing records, run nothing")
    two = commands.add_parser("texts", help="calibration texts")
    two.add_argument("--out", type=Path, required=True, help="keep calibrations and raw records in this folder")
    two.add_argument("--text", action="append", default=[], help="NAME=FILE, a text to evaluate on; repeat")
    two.add_argument("--corpus", action="append", default=[], help="NAME=FILE, one more text to calibrate on")
    two.add_argument("--source", action="append", help="evaluate this source only; repeat")
    two.add_argument("--samples", type=int, default=16, help="samples of a calibration")
    two.add_argument("--length", type=int, default=1024, help="tokens per sample")
    two.add_argument("--bits", default="2,3", help="bits, separated by commas")
    two.add_argument("--record", action="store_true", help="add the results to benchmarks/records")
    for command, run in ((one, tables_command), (two, texts_command)):
        command.add_argument("--model", default="smollm2", help="name, folder or Hub id")
        command.add_argument("--windows", type=int, default=4, help="windows of each text")
        command.set_defaults(run=run)
    args = options.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
