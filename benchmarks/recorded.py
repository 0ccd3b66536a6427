"""Helpers of the benchmarks: options, times in turns, records with a header per run, tables."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tersekv.cli.installation import run_header
from tersekv.lab.evals import runs
from tersekv.lab.evals.records import versions

Row = dict[str, Any]
RECORDS = Path(__file__).resolve().parent / "records"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a file's docstring as its help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_models(to: argparse.ArgumentParser) -> None:
    """Add the option --model, which may be repeated."""
    said = "name, folder, GGUF file or Hub id; repeat for several models (default: smollm2)"
    to.add_argument("--model", action="append", help=said)


def add_options(to: argparse.ArgumentParser) -> None:
    """Add the options that name the models and the records."""
    add_models(to)
    to.add_argument("--out", type=Path, help="run, and add records to this file")
    to.add_argument("--records", type=Path, help="records to print the tables of")


def run_or_print(
    args: argparse.Namespace, run: Callable[[argparse.Namespace], None], tables: Callable[[list[Row]], Iterable[str]]
) -> None:
    """Run each model if there is a file for records. Print the tables of records that are given, model by model."""
    if args.out is not None:
        for model in args.model or ["smollm2"]:
            run(argparse.Namespace(**vars(args) | {"model": model}))
    if args.records is not None:
        lines = runs.read(args.records)
        for model in args.model or dict.fromkeys(line["model"] for line in lines):
            print("\n\n".join([model, *tables([line for line in lines if line["model"] == model])]))


def record(out: Path | None, about: Row, rows: Iterable[Row]) -> None:
    """Append rows to a file of records, if one is given. about: options of the run, which its header has beside the
    command, the commit, the machine and the versions."""
    if out is not None:
        runs.append(out, {**run_header(), "versions": versions(), **about}, rows)


def in_turns(functions: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Return the seconds of each call, by function. Functions take turns, so that load of the machine falls on all.

    The first `warm_up` rounds are not counted.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_up + rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - start)
    return times


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call, of the clock and of the CPU."""
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def medians(found: Iterable[tuple[float, float]]) -> list[float]:
    """Return the medians of the seconds of the clock and of those of the CPU, in tenths of a millisecond."""
    return [round(statistics.median(kind), 4) for kind in zip(*found, strict=True)]


def median_of(values: Sequence[float]) -> float:
    """Return the median of repeated timings, rounded to four digits."""
    return float(f"{statistics.median(values):.4g}")


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=140).print(table)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in markdown."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])
