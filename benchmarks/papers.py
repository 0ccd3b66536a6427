"""Tables and figures of the papers, each by one command.

    python benchmarks/papers.py                                 # list them.
    python benchmarks/papers.py kvquant table2 --out folder     # run with SmolLM2 and print.
    python benchmarks/papers.py kvquant table2 --out folder --values 2k,4k --samples 10 --hours 2
    python benchmarks/papers.py --page docs                     # pages from records.

With `--record` the results go to benchmarks/records/papers, from which the pages are written.

A stopped run continues where it was. Cells are filled in rounds of more and more samples, so that a
run which is out of time is even. The table says how many samples are left out.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import recorded
from experiments import kvquant, kvquant_tables, polarquant, qjl, subgen
from experiments.base import Experiment, OutOfTimeError, Result, Setting
from recorded import add_models
from tersekv.errors import UserError
from tersekv.lab.evals import runs
from tersekv.lab.evals.records import versions

PAPERS: dict[str, tuple[str, dict[str, Experiment]]] = {
    "qjl": ("QJL (arXiv 2406.03482)", qjl.EXPERIMENTS),
    "kvquant": ("KVQuant (arXiv 2401.18079)", kvquant.EXPERIMENTS | kvquant_tables.EXPERIMENTS),
    "subgen": ("SubGen (arXiv 2402.06082)", subgen.EXPERIMENTS),
    "polarquant": ("PolarQuant (arXiv 2502.02617)", polarquant.EXPERIMENTS),
}
PAGES = {("kvquant", table): "methods/kvquant-ablations" for table in kvquant_tables.EXPERIMENTS}
"""Pages of tables that are not on their paper's page."""
RECORDS = Path(__file__).parent / "records" / "papers"
BEGIN, END = "<!-- papers: made by benchmarks/papers.py -->", "<!-- end of papers -->"
NAMES = {"accuracy": "accuracy", "recall": "recall", "gold_nll": "NLL of the answer (nats per token)"}
NAMES |= {
    "seconds": "seconds",
    "kl": "KL divergence (nats)",
    "perplexity_ratio": "perplexity / full",
    "perplexity": "perplexity",
}
SHARED = ("paper", "model", "dtype", "options", "threads", "versions")
"""Fields of the headers of records."""
MOST_COLUMNS = 7
"""Tables with more columns than this, and than rows, are turned."""
Line = dict[str, Any]
"""A result with its paper, table, model, dtype and versions, as a record has it."""


def lines_of(paper: str, table: str, setting: Setting, results: Iterable[Result]) -> list[Line]:
    """Return the records of results."""
    model: Line = {"model": setting.model, "dtype": setting.dtype, "options": setting.options}
    model["threads"] = torch.get_num_threads()
    return [{"paper": paper, "table": table, **model, **asdict(r), "versions": versions()} for r in results]


def read_lines(paper: str) -> list[Line]:
    """Return the committed records of a paper."""
    path = RECORDS / f"{paper}.jsonl"
    return runs.read(path) if path.exists() else []


def keep(paper: str, table: str, lines: Sequence[Line]) -> Path:
    """Replace the committed records of a table and these models by `lines`."""
    ours = {(line["model"], line["dtype"]) for line in lines}
    others = [r for r in read_lines(paper) if r["table"] != table or (r["model"], r["dtype"]) not in ours]
    RECORDS.mkdir(parents=True, exist_ok=True)
    path = RECORDS / f"{paper}.jsonl"
    path.write_text("".join(runs.written([*others, *lines], SHARED)), "utf-8")
    return path


def tables(lines: Sequence[Line]) -> str:
    """Return one markdown table per metric and model: a row per cache, a column per column of the
    experiment."""
    made = []
    for key in dict.fromkeys((r["model"], r["dtype"], r["metric"]) for r in lines):
        ours = [r for r in lines if (r["model"], r["dtype"], r["metric"]) == key]
        made.append(_table(ours, *key))
    return "\n\n".join(made)


def _table(lines: Sequence[Line], model: str, dtype: str, metric: str) -> str:
    rows, columns = (list(dict.fromkeys(r[name] for r in lines)) for name in ("row", "column"))
    cells = {(r["row"], r["column"]): r for r in lines}
    grid = [["", *columns], *([row, *(_cell(cells.get((row, column))) for column in columns)] for row in rows)]
    if any(r["bits"] for r in lines):
        grid = [[*line, held] for line, held in zip(grid, ["true bits", *(_bits(lines, r) for r in rows)], strict=True)]
    if len(columns) > max(MOST_COLUMNS, len(rows)):
        grid = [list(line) for line in zip(*grid, strict=True)]
    options = "".join(f", {name} {value}" for name, value in lines[0]["options"].items())
    out = [wrapped(f"{NAMES.get(metric, metric)}, {model} in {dtype}{options}{_samples(lines)}:"), ""]
    out += [f"| {' | '.join(grid[0])} |", "|---" * len(grid[0]) + "|"]
    return "\n".join([*out, *(f"| {' | '.join(line)} |" for line in grid[1:])])


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
    mean = line["mean"]
    text = f"{mean:.3f}" if abs(mean) < 10 else f"{mean:.2f}" if abs(mean) < 100 else f"{mean:,.0f}"
    return text if line["stderr"] is None else f"{text} ± {line['stderr']:.{2 if mean < 10 else 1}g}"


def section(paper: str, table: str, lines: Sequence[Line]) -> str:
    """Return an experiment in markdown: title, command, protocol, the paper's figures, ours."""
    experiment = PAPERS[paper][1][table]
    ours = tables(lines) if lines else "Not run here."
    text = [experiment.protocol, f"**Paper.** {experiment.quoted}", f"**Here.** {ours.partition('|')[0]}"]
    parts = [f"### {experiment.title}", f"`python benchmarks/papers.py {paper} {table} --out DIR`", *map(wrapped, text)]
    return "\n\n".join(parts) + ("\n\n" + "|" + ours.partition("|")[2] if "|" in ours else "")


def wrapped(text: str) -> str:
    """Return a paragraph in lines of at most 100 columns."""
    return textwrap.fill(text.strip(), 100, break_long_words=False, break_on_hyphens=False)


def pages() -> list[str]:
    """Return the names of all pages that hold tables, without their suffix."""
    return ["reproduction", *(f"reproduction/{paper}" for paper in PAPERS), *dict.fromkeys(PAGES.values())]


def write_pages(docs: Path) -> None:
    """Write every table on its page, below the page's introduction, and the list on
    docs/reproduction.md."""
    index, bodies = [], {}
    for paper, (name, experiments) in PAPERS.items():
        rows = []
        bodies[f"reproduction/{paper}"] = ""
        for table, experiment in experiments.items():
            lines = [r for r in read_lines(paper) if r["table"] == table]
            page = PAGES.get((paper, table), f"reproduction/{paper}")
            bodies[page] = "\n\n".join(filter(None, [bodies.get(page, ""), section(paper, table, lines)]))
            name_of = f"[`{table}`]({page}.md)" if (paper, table) in PAGES else f"`{table}`"
            rows.append(f"| {name_of} | {experiment.title} | {_ran(lines)} |")
        index.append("\n".join([f"## [{name}](reproduction/{paper}.md)", "", "| table | subject | run here |"]))
        index[-1] += "\n|---|---|---|\n" + "\n".join(rows)
    for page, body in bodies.items():
        replace(docs / f"{page}.md", body)
    replace(docs / "reproduction.md", "\n\n".join(index))


def _ran(lines: Sequence[Line]) -> str:
    if not lines:
        return "not here"
    models = ", ".join(dict.fromkeys(f"{r['model']}, {r['dtype']}" for r in lines))
    return f"{models}{_samples(lines)}"


def replace(path: Path, body: str) -> None:
    """Replace the text between the markers of a page."""
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


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
        values=tuple(filter(None, args.values.split(","))),
        rows=tuple(filter(None, args.rows.split(";"))),
        options=dict(text.partition("=")[::2] for text in args.option),
    )
    if not args.print:
        try:
            experiment.run(setting)
        except OutOfTimeError:
            print(f"\nout of time after {args.hours:g} hours; the same command continues", flush=True)
    lines = lines_of(paper, table, setting, experiment.results(setting))
    print("\n\n" + section(paper, table, lines))
    if args.record and lines:
        print(f"\nwritten to {keep(paper, table, lines)}")


def main() -> None:
    """Parse the options; list, run, or write the pages."""
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
    parser.add_argument("--values", default="", help="columns in place of the paper's, for example 1k,2k")
    parser.add_argument("--rows", default="", help="labels of rows, separated by semicolons; default: all")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the evaluation, not the paper's")
    parser.add_argument("--print", action="store_true", help="print from existing records, run nothing")
    parser.add_argument("--record", action="store_true", help="write the results to benchmarks/records/papers")
    parser.add_argument("--page", type=Path, help="documentation folder whose pages are written from the records")
    args = parser.parse_args()
    try:
        if args.page is not None:
            write_pages(args.page)
        elif args.table is None:
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
