"""Experiments that measure perplexity over windows of a text, with every key and value quantised in
one forward pass (`tersekv eval perplexity --mode simulate`), as KVQuant does.

A cell names its recipe, its calibration corpus and the text. Cells of different tables share records
and calibrations, so that a recipe is evaluated once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.base import KVQUANT_CORPUS, Corpus, Experiment, Result, Setting, calibrated, values_of
from tersekv.codecs import methods
from tersekv.errors import UserError
from tersekv.lab.evals.harness import Harness, Progress, metrics_of
from tersekv.lab.evals.options import build
from tersekv.lab.evals.reader import FULL
from tersekv.lab.evals.records import FILE, Record, Records, read
from tersekv.recipe import Recipe

WIKITEXT = "wikitext-2/test_gptq_joined.txt"
C4 = "c4/c4.utf8"
CONTEXT = 2048
TASK = "perplexity"
Group = tuple[Corpus, str, int, int]
METRICS = ("perplexity", "perplexity_ratio")


@dataclass(frozen=True)
class Cell:
    """A recipe in a row and column.

    corpus: samples it is calibrated on. text: file in the data folder. context: tokens per window.
    sinks: number of first tokens that stay exact.
    """

    row: str
    column: str
    recipe: str
    corpus: Corpus = KVQUANT_CORPUS
    text: str = WIKITEXT
    context: int = CONTEXT
    sinks: int = 1

    @property
    def group(self) -> Group:
        """Cells of one group are evaluated together."""
        return self.corpus, self.text, self.context, self.sinks


@dataclass(frozen=True)
class Windows(Experiment):
    """Perplexities of cells, and their ratios to the full cache on the same windows.

    samples: windows of 2,048 tokens. Cells with another context read as many tokens.

    Options make a run cheaper than the paper's: `context`, tokens per window, and `calibration`, for example 4x512
    for four samples of 512.
    """

    cells: tuple[Cell, ...] = ()
    samples: int = 8
    full: str = "full cache"

    def run(self, setting: Setting) -> None:
        """Calibrate what has no calibration, then evaluate window by window what has no record."""
        cells = self._chosen(setting)
        model, tokenizer = setting.loaded
        for group in dict.fromkeys(cell.group for cell in cells):
            corpus, text, context, sinks = group
            recipes = list(dict.fromkeys(cell.recipe for cell in cells if cell.group == group))
            run = Harness(model, tokenizer, setting.model, recipes, calibrated(recipes, setting, corpus))
            options = _options(context, sinks, self._windows(setting, context)) | {"text": setting.text(text)}

            def progress(at: Progress) -> None:
                setting.check_time()
                print(f"\r{at.done}/{at.total} {at.sample} {at.recipe[:80]:80}", end="", flush=True)

            with Records(self._folder(setting, group)) as records:
                run.run(build([TASK], options), records, progress)

    def results(self, setting: Setting) -> list[Result]:
        """Return perplexities and ratios. Each column is over the windows that all of its rows have."""
        found: list[Result] = []
        columns: dict[str, list[Cell]] = {}
        for cell in self._chosen(setting):
            columns.setdefault(cell.column, []).append(cell)
        for column, cells in columns.items():
            records = {group: self._records(setting, group) for group in dict.fromkeys(cell.group for cell in cells)}
            rows = {cell.row: (cell.recipe, records[cell.group].get(cell.recipe, {})) for cell in cells}
            full_cache: dict[str, Record] = {}  # depends on neither the calibration nor the exact tokens
            for found_in in records.values():
                full_cache |= found_in.get(FULL, {})
            rows = {self.full: (FULL, full_cache), **rows}
            there = {row: (recipe, by_window) for row, (recipe, by_window) in rows.items() if by_window}
            common = set.intersection(*(set(by_window) for _, by_window in there.values())) if there else set()
            most = self._windows(setting, cells[0].context)
            samples = sorted(common, key=lambda sample: int(sample.split("-")[0]))[:most]
            if self.full not in there or not samples:
                continue
            full = [there[self.full][1][sample] for sample in samples]
            for row, (recipe, by_window) in there.items():
                found += _results(row, column, recipe, [by_window[sample] for sample in samples], full, most)
        return sorted(found, key=lambda r: METRICS.index(r.metric))

    def _chosen(self, setting: Setting) -> list[Cell]:
        rows, columns = setting.chosen({cell.row: cell for cell in self.cells}), {cell.column for cell in self.cells}
        if unknown := [value for value in setting.values if value not in columns]:
            raise UserError(f"no column {unknown[0]!r}: choose from {'; '.join(sorted(columns))}")
        return [
            _cheaper(cell, setting.options)
            for cell in self.cells
            if cell.row in rows and (not setting.values or cell.column in setting.values)
        ]

    def _windows(self, setting: Setting, context: int) -> int:
        return max(1, (setting.samples or self.samples) * CONTEXT // context)

    def _folder(self, setting: Setting, group: Group) -> Path:
        """Return the folder of a group's records, shared by all tables."""
        corpus, text, context, _ = group
        name = f"{corpus.name}-{Path(text).stem}-{context}"
        return setting.out.parent / "windows" / f"{setting.model.replace('/', '--')}-{setting.dtype}" / name

    def _records(self, setting: Setting, group: Group) -> dict[str, dict[str, Record]]:
        """Return records by recipe and window."""
        folder = self._folder(setting, group)
        if not (folder / FILE).exists():
            return {}
        _, _, context, sinks = group
        wanted = {"context": context, "sinks": sinks, "mode": "simulate"}
        found: dict[str, dict[str, Record]] = {}
        for record in read(folder):
            if wanted.items() <= record["options"].items():
                found.setdefault(record["recipe"], {})[record["sample"]] = record
        return found


def _results(
    row: str, column: str, name: str, ours: Sequence[Record], full: Sequence[Record], wanted: int
) -> Iterator[Result]:
    """Yield the metrics of one recipe.

    Only the ratio has a standard error. That of a perplexity is the spread of the windows, which all
    recipes share.
    """
    summary = build([TASK], {})[TASK].summarise([metrics_of(r) for r in ours], [metrics_of(r) for r in full])
    bits = sum(r["bits_per_element"] for r in ours) / len(ours)
    held = round(sum(r["bytes"] for r in ours) / len(ours))
    for metric in METRICS if name != FULL else METRICS[:1]:
        mean, stderr = summary[metric]
        error = stderr if metric == "perplexity_ratio" and math.isfinite(stderr) else None
        yield Result(row, column, metric, mean, error, len(ours), wanted, bits, held, name, values_of(metric, ours))


def _cheaper(cell: Cell, options: Mapping[str, str]) -> Cell:
    samples, _, length = options.get("calibration", "").partition("x")
    corpus = replace(cell.corpus, samples=int(samples), length=int(length)) if length else cell.corpus
    return replace(cell, corpus=corpus, context=int(options.get("context", cell.context)))


def _options(context: int, sinks: int, windows: int) -> dict[str, str]:
    return {"context": str(context), "sinks": str(sinks), "windows": str(windows), "mode": "simulate"}


def recipe(method: str, **options: object) -> str:
    """Return a recipe without the options that have their default, so that equal recipes are equal
    texts.
    """
    defaults = {name: p.default for name, p in methods()[method].parameters.items()}
    defaults["pre_rope"] = methods()[method].build().keys.pre_rope
    given = {name: value for name, value in options.items() if value != defaults[name]}
    text = ",".join(f"{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in given.items())
    return str(Recipe.parse(f"{method}:{text}" if text else method))


def by_bits(rows: Sequence[tuple[str, str, dict[str, object]]], **cell: Any) -> tuple[Cell, ...]:
    """Return cells with a column per bit width 4, 3 and 2, of rows (label, method, options)."""
    return tuple(
        Cell(label, f"{bits} bits", recipe(method, bits=bits, **options), **cell)
        for bits in (4, 3, 2)
        for label, method, options in rows
    )
