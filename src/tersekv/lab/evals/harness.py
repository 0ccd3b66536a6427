"""Run tasks with several recipes on the same samples. The full cache always comes first."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tersekv.hf.prefill import Prefill
from tersekv.lab.evals.products import unique
from tersekv.lab.evals.reader import FULL, Reader
from tersekv.lab.evals.records import Record, Records, make
from tersekv.lab.evals.tasks.base import Estimate, Sample, Task
from tersekv.models.fingerprint import fingerprint


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    done, total: numbers of evaluations, including those found in earlier records. task, sample,
    recipe: the next evaluation.
    """

    done: int
    total: int
    task: str
    sample: str
    recipe: str


@dataclass(frozen=True)
class Summary:
    """Results of one task and recipe.

    Tokens read, true bits per element, bytes held and metrics are means over samples. `seconds` is
    the sum over all samples.
    """

    task: str
    recipe: str
    samples: int
    tokens: int
    bits_per_element: float
    bytes: int
    metrics: dict[str, Estimate]
    seconds: float

    def document(self) -> dict[str, Any]:
        """Return the entry of the program's JSON document. Numbers that are not finite become null."""
        metrics = {
            name: {"mean": _finite(estimate.mean), "stderr": _finite(estimate.stderr)}
            for name, estimate in self.metrics.items()
        }
        return {**dataclasses.asdict(self), "metrics": metrics}


class Harness:
    """A model and recipes, ready to run tasks.

    model_name: the model's name in records. recipes: canonical strings; `full` is added as the
    first. calibration: a file or a folder of files, for recipes that need a calibration corpus.

    Raises:
        UserError: a recipe that does not parse or does not support the model.
    """

    def __init__(
        self, model: Any, tokenizer: Any, model_name: str, recipes: Sequence[str], calibration: Path | None = None
    ) -> None:
        self.model_name = model_name
        prefill = Prefill(model)
        names = unique([FULL, *recipes])
        self.readers = [Reader(model, tokenizer, name, prefill, calibration) for name in names]
        self.full = self.readers[0]
        self._weights = fingerprint(model)[:16]

    def run(
        self, tasks: dict[str, Task], records: Records | None = None, progress: Callable[[Progress], None] | None = None
    ) -> list[Summary]:
        """Score every sample of every task with every recipe, and return a summary of each task and recipe.

        records: what it holds already is not run again; without it nothing is kept. progress: called before each score.

        Raises:
            UserError: a task does not take one of the recipes, or cannot make its samples.
        """
        records = Records() if records is None else records
        for task in tasks.values():
            for reader in self.readers:
                task.check(reader)
        samples = {name: task.instances(self.full) for name, task in tasks.items()}
        records.warn_of_others(
            self._asked(name, task, sample, reader)
            for name, task in tasks.items() for sample in samples[name] for reader in self.readers
        )  # fmt: skip
        total = sum(map(len, samples.values())) * len(self.readers)
        done = 0
        summaries = []
        for name, task in tasks.items():
            by_recipe: dict[str, list[Record]] = {reader.recipe: [] for reader in self.readers}
            for sample in samples[name]:
                for reader in self.readers:
                    if progress is not None:
                        progress(Progress(done, total, name, sample.id, reader.recipe))
                    by_recipe[reader.recipe].append(self._record(name, task, sample, reader, records))
                    done += 1
            summaries += [summarise(task, found, by_recipe[FULL]) for found in by_recipe.values() if found]
        return summaries

    def _record(self, name: str, task: Task, sample: Sample, reader: Reader, records: Records) -> Record:
        asked = self._asked(name, task, sample, reader)
        found = records.find(asked)
        if found is not None:
            return found
        torch.manual_seed(asked["seed"])
        start = time.perf_counter()
        result = task.evaluate(sample, reader, self.full)
        return records.add(make(asked, result, reader.extras(), time.perf_counter() - start))

    def _asked(self, name: str, task: Task, sample: Sample, reader: Reader) -> Record:
        calibration = reader.extras().get("calibration")
        return {
            "task": name,
            "options": json.loads(json.dumps(dataclasses.asdict(task), default=str)),
            "sample": sample.id,
            "recipe": reader.recipe,
            "model": self.model_name,
            "seed": getattr(task, "seed", 0),
            "weights": self._weights,
            **{name: value for name in ("content", "given") if (value := getattr(sample, name))},
            **({"calibration": calibration["digest"]} if calibration else {}),
        }


def summarise(task: Task, found: Sequence[Record], full: Sequence[Record]) -> Summary:
    """Summarise one recipe's records. `full` holds the full cache's records of the same samples."""
    first = found[0]
    return Summary(
        task=first["task"],
        recipe=first["recipe"],
        samples=len(found),
        tokens=round(statistics.fmean(r["tokens"] for r in found)),
        bits_per_element=round(statistics.fmean(r["bits_per_element"] for r in found), 4),
        bytes=round(statistics.fmean(r["bytes"] for r in found)),
        metrics=task.summarise([metrics_of(r) for r in found], [metrics_of(r) for r in full]),
        seconds=round(sum(r["seconds"] for r in found), 3),
    )


def metrics_of(record: Record) -> dict[str, float]:
    """Return the metrics of a record, NaN where they were not finite."""
    return {name: math.nan if value is None else value for name, value in record["metrics"].items()}


def _finite(x: float) -> float | None:
    return float(f"{x:.7g}") if math.isfinite(x) else None
