"""Synthetic evaluation records as the harness writes them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tersekv.cache.footprint import Footprint
from tersekv.lab.evals import runs
from tersekv.lab.evals.records import FILE, SHARED, make
from tersekv.lab.evals.tasks import tasks
from tersekv.lab.evals.tasks.base import Result
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict

SHAPE = CacheShape((None, None), 1, 64, 64)
DAMAGE = {
    "turboquant:bits=2": 1.1, "kivi:bits=2": 0.35, "kivi:bits=4": 0.013, "uniform:bits=4": 0.11, "normalfloat": 0.09,
    "qjl/uniform:bits=4": 0.38, "window:recent=64,sinks=8+kivi:bits=2": 0.42, "kivi:bits=2;0=exact": 0.3,
}  # fmt: skip


def record(task: str, options: dict[str, Any], sample: str, recipe: str, metrics: dict[str, float], **more: Any) -> Any:
    """Return a record as the harness writes it, at 2,048 tokens unless `details` have a length."""
    made = tasks()[task](**options)
    details = more.get("details", {})
    n = details.get("length", 2048)
    elements = SHAPE.elements(n)
    footprint = Footprint(n, elements, {"exact": elements * 2})
    if recipe != "full":
        footprint = predict(SHAPE, Recipe.parse(recipe), n)
    asked = {
        "task": task, "options": json.loads(json.dumps(dataclasses.asdict(made), default=str)), "sample": sample,
        "recipe": recipe, "model": more.get("model", "tiny"), "seed": 0,
    }  # fmt: skip
    return make(asked, Result(metrics, n, footprint, details), {}, 1.5)


def evaluation(model: str = "tiny") -> list[Any]:
    """Return records of perplexity and a needle grid for nine recipes."""
    rng = Random(0)
    made = []
    for recipe, damage in {"full": 0.0, **DAMAGE}.items():
        for window in range(3):
            nll = 3 + window / 10 + damage * (1 + window / 50)
            made.append(record("perplexity", {}, f"{window}", recipe, {"nll": nll}, model=model))
        for length in (1024, 2048):
            for depth in (0, 50, 100):
                right = float(rng.random() >= min(0.9, damage))
                cell = {"length": length, "depth": depth}
                name = f"{length}-{depth}-0"
                made.append(record("needle", {}, name, recipe, {"accuracy": right}, details=cell, model=model))
    return made


def write(folder: Path, records: list[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text("".join(runs.written(records, SHARED)))
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a folder as `tersekv eval --out` leaves it."""
    return write(tmp_path_factory.mktemp("evaluation") / "results", evaluation())
