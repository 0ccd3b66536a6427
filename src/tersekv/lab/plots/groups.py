"""Group comparable records of an evaluation: one task with its options, model and seed, and all
recipes."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tersekv.errors import UserError, hint
from tersekv.lab.evals.harness import Summary, summarise
from tersekv.lab.evals.options import written
from tersekv.lab.evals.reader import FULL
from tersekv.lab.evals.records import COUNTS, FILE, GIVEN, Record, key_of, of_each_sample, read
from tersekv.lab.evals.runs import expanded
from tersekv.lab.evals.tasks import Task, tasks
from tersekv.lab.plots.benchmarks import DRAWN_BY

PREFERRED = ("kl", "perplexity_ratio", "accuracy", "perplexity")
"""Metrics in order of preference. The first one that a task has is used by default."""
LOWER_IS_BETTER = ("perplexity", "nll", "kl", "gold_nll")
_UNITS = {"perplexity_ratio": "perplexity / the full cache's", "kl": "KL divergence from the full cache (nats)"}


@dataclass(frozen=True)
class Group:
    """Comparable records of one task.

    records: by recipe, the full cache first. Recipes only have samples that the full cache has too, each once: the
        latest of a sample, with the calibration of the recipe's latest record.
    options: those of the run with the most samples.
    """

    task: Task
    name: str
    options: dict[str, Any]
    model: str
    seed: int
    records: dict[str, list[Record]]
    summaries: list[Summary]

    @property
    def title(self) -> str:
        """Describe the task and the text that it reads in plain words."""
        return f"{self.name}: {self.task.about()}"

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from the task's defaults."""
        defaults = {field.name: field.default for field in dataclasses.fields(self.task)}
        return {name: value for name, value in self.options.items() if value != defaults.get(name)}

    def command(self, out: str) -> str:
        """Return the `tersekv eval` command that makes these records."""
        recipes = [part for recipe in self.records if recipe != FULL for part in ("--recipe", recipe)]
        options = [
            part for name, value in self.changed().items() for part in (f"--{name.replace('_', '-')}", written(value))
        ]
        return shlex.join(["tersekv", "eval", self.name, "--model", self.model, *options, *recipes, "--out", out])

    @property
    def full(self) -> Summary:
        """Summary of the full cache."""
        return self.summaries[0]

    @property
    def packed(self) -> list[Summary]:
        """Summaries of the other recipes."""
        return self.summaries[1:]

    def metric(self, asked: str | None = None) -> str | None:
        """Return the requested metric, or the preferred one by default; None if the task does not
        have it."""
        names = self.full.metrics
        wanted = PREFERRED if asked is None else (asked,)
        return next((name for name in wanted if name in names), None)


def read_records(paths: Sequence[Path]) -> list[Record]:
    """Return the evaluation records in files or folders, each once.

    Raises:
        UserError: there are no records, or they are of another kind.
    """
    if not paths:
        raise UserError("no records were given: give the folder that `tersekv eval … --out FOLDER` wrote")
    found: dict[str, Record] = {}
    for path in paths:
        if path.is_dir() and not (path / FILE).is_file():
            raise UserError(f"{path} holds no {FILE}: give the folder that `tersekv eval … --out FOLDER` wrote")
        _refuse_benchmarks(path)
        for record in read(path):
            _check(record, path)
            found[key_of(record)] = record
    if not found:
        raise UserError(f"{', '.join(map(str, paths))} has no records yet: run `tersekv eval … --out FOLDER`")
    return list(found.values())


def grouped(records: Sequence[Record], task: str | None = None) -> list[Group]:
    """Group records, in the order of their first records. With `task`, use only records of that
    task.

    Raises:
        UserError: no records of that task, or tasks or options that this version does not know.
    """
    names = list(dict.fromkeys(record["task"] for record in records))
    if task is not None and task not in names:
        raise UserError(f"the records have no task {task!r}{hint(task, names)} (they have {', '.join(names)})")
    found: dict[str, list[Record]] = {}
    for record in records:
        if task in (None, record["task"]):
            same = [record["task"], of_each_sample(record["options"]), record["model"], record["seed"]]
            same += [record.get("weights")]
            found.setdefault(json.dumps(same, sort_keys=True), []).append(record)
    return [_group(members) for members in found.values()]


def lower_is_better(metric: str) -> bool:
    """True if a smaller value of the metric is better."""
    return metric.startswith(LOWER_IS_BETTER)


def axis_label(metric: str) -> str:
    """Return a metric's name with its unit."""
    arrow = "lower is better" if lower_is_better(metric) else "higher is better"
    return f"{_UNITS.get(metric, metric.replace('_', ' '))}, {arrow}"


def _group(members: Sequence[Record]) -> Group:
    first = max(members, key=lambda record: [record["options"].get(name) or math.inf for name in COUNTS])
    known = tasks()
    try:
        task = known[first["task"]](**first["options"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"records of task {first['task']!r} with options {first['options']} are of another version: "
            "run the evaluation again into a new folder"
        ) from error
    full = {record["sample"]: record for record in members if record["recipe"] == FULL}
    if not full:
        raise UserError(
            f"the records of task {first['task']!r} lack the full cache, the baseline of all comparisons: "
            "run `tersekv eval` again with the same --out"
        )
    latest = {record["recipe"]: record.get("calibration") for record in members}
    found = {FULL: full}
    for record in members:
        recipe, same = record["recipe"], full.get(record["sample"])
        if same and recipe != FULL and record.get("calibration") == latest[recipe] and _same_text(record, same):
            found.setdefault(recipe, {})[record["sample"]] = record
    by_recipe = {recipe: list(records.values()) for recipe, records in found.items()}
    summaries = [summarise(task, own, [full[record["sample"]] for record in own]) for own in by_recipe.values()]
    return Group(task, first["task"], first["options"], first["model"], first["seed"], by_recipe, summaries)


def _same_text(record: Record, other: Record) -> bool:
    """Return True if samples with one id read the same text and tokens, as far as the records tell."""
    return all(record.get(x, other.get(x)) == other.get(x, record.get(x)) for x in ("content", GIVEN))


def _refuse_benchmarks(path: Path) -> None:
    """Raise an error for records of a benchmark, which are JSON lines too. It names the plot for
    them."""
    try:
        lines = (path / FILE if path.is_dir() else path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError):
        return  # the reader reports the error
    _, first = next(expanded(lines), (1, None))
    if isinstance(first, dict) and "task" not in first:
        kind = DRAWN_BY.get(first.get("bench", ""))
        drawn = f"; `tersekv plot {kind} {path}` draws those" if kind else ""
        raise UserError(f"{path} holds records of a benchmark, not of `tersekv eval`{drawn}")


def _check(record: Record, path: Path) -> None:
    numbers = all(
        isinstance(record.get(name), int | float) and math.isfinite(record[name])
        for name in ("tokens", "bits_per_element", "bytes", "seconds")
    )
    maps = all(isinstance(record.get(name), dict) for name in ("options", "metrics", "bytes_by_part", "details"))
    if not (numbers and maps):
        raise UserError(
            f"{path} has a record of task {record['task']!r}, recipe {record['recipe']!r} without all its numbers: "
            "run the evaluation again into a new folder"
        )
