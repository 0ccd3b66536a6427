"""What a task is: a frozen, self-validating dataclass that makes samples and scores a reader on each of them.

A task's fields are its options (`tersekv eval <task> --field value`); the file's name is the task's name and its
`TASK = TheClass` is the registration. Every recipe, and `full`, sees the same samples in one run.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tersekv.cache.footprint import Footprint

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader


@dataclass(frozen=True)
class Sample:
    """One instance. id: the same in every run with equal options. data: what the task needs to evaluate it."""

    id: str
    data: Any


@dataclass(frozen=True)
class Result:
    """What one reader made of one sample: metrics by name (fractions, not percent), tokens read, bytes held at that
    length, and what a person would look at (the answer, the expected one)."""

    metrics: dict[str, float]
    tokens: int
    footprint: Footprint
    details: dict[str, Any] = field(default_factory=dict)


class Estimate(NamedTuple):
    """A mean over samples and its standard error (NaN for a single sample)."""

    mean: float
    stderr: float

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """Mean and s/√n."""
        mean = statistics.fmean(values) if values else math.nan
        spread = len(values) > 1 and all(map(math.isfinite, values))  # stdev cannot take NaN
        stderr = statistics.stdev(values) / math.sqrt(len(values)) if spread else math.nan
        return Estimate(mean, stderr)


@dataclass(frozen=True)
class Task(ABC):
    """A task with its options."""

    @property
    def more(self) -> tuple[str, ...]:
        """Metrics that tables show only where they are asked for."""
        return ()

    def about(self) -> str:
        """What is read, in plain words; here the options by name."""
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ", ".join(f"{name} {value}" for name, value in said.items() if value not in ("", None))

    @abstractmethod
    def instances(self, reader: Reader) -> Sequence[Sample]:
        """The samples, made with the reader's tokenizer and no longer than its context; seeded.

        Raises:
            UserError: options that do not fit, data that is not there (and where to get it).
        """

    @abstractmethod
    def evaluate(self, sample: Sample, reader: Reader, full: Reader) -> Result:
        """Score `reader` on a sample; `full` reads the same with the full cache (they are one where reader is it)."""

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """Means over samples; `full` holds the full cache's metrics on the same samples, in the same order."""
        return {name: Estimate.of([m[name] for m in metrics]) for name in (metrics[0] if metrics else {})}
