"""Tables and figures of the papers, each by one command.

    python benchmarks/papers.py                                 # list them.
    python benchmarks/papers.py kvquant table2 --out folder     # run with SmolLM2 and print.
    python benchmarks/papers.py kvquant table2 --out folder --values 2k,4k --samples 10 --hours 2

With `--record` the results go to benchmarks/records/papers, from which docs/measured/papers.md and kvquant.md are made.

A stopped run continues where it was. Cells are filled in rounds of more and more samples, so that a
run which is out of time is even. The table says how many samples are left out.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import recorded
from experiments import kvquant, kvquant_tables, polarquant, qjl, subgen
from experiments.base import Experiment, OutOfTimeError, Result, Setting
from measured.base import MODELS, Section, wrapped
from recorded import add_models, markdown
from tersekv.cli.installation import run_header
from tersekv.errors import UserError
from tersekv.lab.evals import runs
from tersekv.lab.evals.records import versions

PAPERS: dict[str, tuple[str, dict[str, Experiment]]] = {
    "qjl": ("QJL (arXiv 2406.03482)", qjl.EXPERIMENTS),
    "kvquant": ("KVQuant (arXiv 2401.18079)", kvquant.EXPERIMENTS | kvquant_tables.EXPERIMENTS),
    "subgen": ("SubGen (arXiv 2402.06082)", subgen.EXPERIMENTS),
    "polarquant": ("PolarQuant (arXiv 2502.02617)", polarquant.EXPERIMENTS),
}
RECORDS = recorded.RECORDS / "papers"
NAMES = {"accuracy": "accuracy", "recall": "recall", "gold_nll": "NLL of the answer (nats per token)"}
NAMES |= {"kl": "KL divergence (nats)", "perplexity_ratio": "perplexity / full"}
SHARED = ("command", "commit", "cpu", "isa", "paper", "model", "dtype", "options", "threads", "versions")
"""Fields of the headers of records."""
ROWS = {"default": "trellis, 3 bits"}
"""Names of rows that mean something else today."""
CELLS = "model", "dtype", "column", "row"
"""Fields that name a cell of a table. A run replaces the cells that it has."""
FULL = "full cache"
FEWEST = 8
"""Cells with fewer samples are not printed, unless the experiment wants no more."""
MOST_COLUMNS = 7
"""Tables with more columns than this, and than rows, are turned."""
Line = dict[str, Any]
"""A result with its paper, table, model, dtype and versions, as a record has it."""


def lines_of(paper: str, table: str, setting: Setting, results: Iterable[Result]) -> list[Line]:
    """Return the records of results."""
    model: Line = {"model": setting.model, "dtype": setting.dtype, "options": setting.options}
    about = {name: value for name, value in run_header().items() if name != "flags"}
    return [{**about, "paper": paper, "table": table, **model, **asdict(r), "versions": versions()} for r in results]


def read_lines(paper: str) -> list[Line]:
    """Return the committed records of a paper."""
    path = RECORDS / f"{paper}.jsonl"
    return runs.read(path) if path.exists() else []


def keep(paper: str, table: str, lines: Sequence[Line]) -> Path:
    """Replace the committed records of the cells of a table that are in `lines`."""
    held = read_lines(paper)
    elsewhere, here = ([r for r in held if (r["table"] == table) is there] for there in (False, True))
    columns = list(dict.fromkeys(r["column"] for r in (*here, *lines)))  # in the order of the first run
    ours = {tuple(line[name] for name in CELLS) for line in lines}
    others = [r for r in here if tuple(r[name] for name in CELLS) not in ours]
    experiment = PAPERS[paper][1][table]
    cells = (getattr(cell, "row", "") for cell in getattr(experiment, "cells", ()))
    rows = list(dict.fromkeys((FULL, *getattr(experiment, "rows", ()), *cells, *(r["row"] for r in (*here, *lines)))))
    models = list(dict.fromkeys(r["model"] for r in (*here, *lines)))
    made = sorted(
        (*others, *lines),
        key=lambda r: (columns.index(r["column"]), models.index(r["model"]), rows.index(r["row"])),
    )
    RECORDS.mkdir(parents=True, exist_ok=True)
    path = RECORDS / f"{paper}.jsonl"
    path.write_text("".join(runs.written([*elsewhere, *made], SHARED)), "utf-8")
    return path


def tables(lines: Sequence[Line]) -> str:
    """Return the tables of results in markdown, by model and metric: a row per cache, a column per column of the
    experiment.

    Two metrics of the same cells share a table, the second in brackets.
    """
    made = []
    for model, dtype in dict.fromkeys((r["model"], r["dtype"]) for r in lines):
        ours = [r for r in lines if (r["model"], r["dtype"]) == (model, dtype)]
        metrics = list(dict.fromkeys(r["metric"] for r in ours))
        for shown in [metrics] if len(metrics) == 2 else [[metric] for metric in metrics]:
            made.append(_table([r for r in ours if r["metric"] in shown], shown))
    return "\n\n".join(made)


def _table(lines: Sequence[Line], metrics: Sequence[str]) -> str:
    rows, columns = (list(dict.fromkeys(r[name] for r in lines)) for name in ("row", "column"))
    cells = {(r["row"], r["column"], r["metric"]): r for r in lines}
    most = {column: max(r["samples"] for r in lines if r["column"] == column) for column in columns}

    def cell(row: str, column: str) -> str:
        found = [cells.get((row, column, metric)) for metric in metrics]
        first, *more = map(_cell, found)
        text = first if more in ([], ["–"], [first]) else f"{first} ({more[0]})"
        n = min((one["samples"] for one in found if one), default=most[column])
        return text if n in (1, most[column]) or "n = " in text else f"{text}, n = {n}"

    earlier = {r["row"] for r in lines if r["row"] in ROWS and "commit" not in r}
    names = {row: ROWS.get(row, row) + ", an earlier version" * (row in earlier) for row in rows}
    grid = [["", *columns], *([names[row], *(cell(row, column) for column in columns)] for row in rows)]
    if any(r["bits"] for r in lines):
        grid = [[*line, held] for line, held in zip(grid, ["true bits", *(_bits(lines, r) for r in rows)], strict=True)]
    if len(columns) > max(MOST_COLUMNS, len(rows)):
        grid = [list(line) for line in zip(*grid, strict=True)]
    name, *more = (NAMES.get(metric, metric) for metric in metrics)
    options = "".join(f", {key} {value}" for key, value in lines[0]["options"].items())
    about = f"{MODELS.get(lines[0]['model'], lines[0]['model'])} in {lines[0]['dtype']}{options}{_samples(lines)}"
    in_brackets = f", in brackets {more[0]}" if more else ""
    return f"{wrapped(f'{name}{in_brackets}: {about}.')}\n\n{markdown(grid[0], grid[1:])}"


def _bits(lines: Sequence[Line], row: str) -> str:
    """Return the range of a row's true bits over its columns."""
    bits = [r["bits"] for r in lines if r["row"] == row and r["bits"]]
    if not bits:
        return "–"
    return f"{min(bits):.2f}" + (f"–{max(bits):.2f}" if max(bits) - min(bits) >= 0.005 else "")


def _samples(lines: Sequence[Line]) -> str:
    """Return the number of samples, and how many the whole experiment would have."""
    if all(r["wanted"] == 1 for r in lines):
        return ""
    counts = sorted({r["samples"] for r in lines})
    wanted = max(r["wanted"] for r in lines)
    said = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    left = f" of {wanted:,}" if wanted > counts[0] else ""
    return f", {said}{left} samples per cell"


def _cell(line: Line | None) -> str:
    if line is None:
        return "–"
    if line["samples"] < min(FEWEST, line["wanted"]):
        return f"n = {line['samples']}"
    mean = line["mean"]
    text = f"{mean:.3f}" if abs(mean) < 10 else f"{mean:.2f}" if abs(mean) < 100 else f"{mean:,.0f}"
    return text if line["stderr"] is None else f"{text} ± {line['stderr']:.{2 if mean < 10 else 1}g}"


def section(paper: str, table: str, lines: Sequence[Line]) -> Section:
    """Return an experiment: protocol, the paper's figures, ours."""
    experiment = PAPERS[paper][1][table]
    note = f"{experiment.protocol}\n\n**Paper.** {experiment.quoted}"
    return Section(
        experiment.title, note, tables(lines) if lines else "**Here.** Not run.", (), commands(paper, table, lines)
    )


def commands(paper: str, table: str, lines: Sequence[Line]) -> str:
    """Return the commands that made the records of an experiment, or the one that would run it."""
    given = dict.fromkeys(re.sub(r" --(print|record)\b", "", line["command"]) for line in lines if "command" in line)
    return "\n".join(f"python benchmarks/{text}" for text in given) or (
        f"python benchmarks/papers.py {paper} {table} --out out --data data"
    )


def ran(lines: Sequence[Line]) -> str:
    """Return what an experiment was run with."""
    models = dict.fromkeys(f"{MODELS.get(r['model'], r['model'])}, {r['dtype']}" for r in lines)
    return f"{', '.join(models)}{_samples(lines)}" if lines else "not run"


def run(paper: str, table: str, args: argparse.Namespace) -> None:
    """Run an experiment, print it, and keep its results with --record."""
    experiment = PAPERS[paper][1][table]
    setting = Setting(
        model=args.model,
        dtype=args.dtype,
        out=args.out / paper / table,
        data=args.data,
        calibration=args.calibration,
        samples=args.samples,
        hours=args.hours,
        values=tuple(filter(None, args.values.split(";" if ";" in args.values else ","))),
        rows=tuple(filter(None, args.rows.split(";"))),
        options=dict(text.partition("=")[::2] for text in args.option),
    )
    if not args.print:
        try:
            experiment.run(setting)
        except OutOfTimeError:
            print(f"\nout of time after {args.hours:g} hours; the same command continues", flush=True)
    lines = lines_of(paper, table, setting, experiment.results(setting))
    print(f"\n\n{section(paper, table, lines)}")
    if args.record and lines:
        print(f"\nwritten to {keep(paper, table, lines)}")


def main() -> None:
    """Parse the options; list, or run."""
    parser = recorded.parser(__doc__)
    parser.add_argument("paper", nargs="?", choices=PAPERS, help="paper")
    parser.add_argument("table", nargs="?", help="table or figure; without it all of the paper are listed")
    parser.add_argument("--out", type=Path, help="folder of raw records; a stopped run continues from it")
    add_models(parser)
    parser.add_argument("--dtype", default="float32", help="dtype of the weights")
    parser.add_argument("--data", type=Path, help="folder of texts and question sets")
    parser.add_argument("--calibration", type=Path, help="folder of calibration files")
    parser.add_argument("--samples", type=int, help="samples per cell; default: the paper's number")
    parser.add_argument("--hours", type=float, help="stop after this time and report the samples so far")
    parser.add_argument(
        "--values", default="", help="columns in place of the paper's, for example 1k,2k or 1,024;2,048"
    )
    parser.add_argument("--rows", default="", help="labels of rows, separated by semicolons; default: all")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the evaluation, not the paper's")
    parser.add_argument("--print", action="store_true", help="print from existing records, run nothing")
    parser.add_argument("--record", action="store_true", help="write the results to benchmarks/records/papers")
    args = parser.parse_args()
    try:
        if args.table is None:
            for paper in [args.paper] if args.paper else PAPERS:
                print(f"\n{PAPERS[paper][0]}")
                for name, experiment in PAPERS[paper][1].items():
                    print(f"  {paper} {name:12} {experiment.title}")
        elif args.table not in PAPERS[args.paper][1]:
            parser.error(f"{args.paper} has no {args.table}: choose from {', '.join(PAPERS[args.paper][1])}")
        elif args.out is None:
            parser.error("give --out, a folder for raw records")
        else:
            for model in (models := args.model or ["smollm2"]):
                # raw records of several models have folders of their own
                out = args.out / re.sub(r"[^\w.-]+", "-", model) if len(models) > 1 else args.out
                run(args.paper, args.table, argparse.Namespace(**vars(args) | {"model": model, "out": out}))
    except UserError as error:
        sys.exit(f"papers.py: {error}")


if __name__ == "__main__":
    main()
