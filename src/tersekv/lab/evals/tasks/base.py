"""Base class of tasks: a frozen, self-validating dataclass that makes samples and scores a reader
on them.

A task's fields are its options (`tersekv eval <task> --field value`). The file's name is the task's
name, and `TASK = TheClass` registers it. In one run every recipe, and `full`, reads the same
samples.
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
    """One sample. id: the same in every run with equal options. data: input of the task's
    `evaluate`. content: hash of the text in it, if the id has none. given: hash of its token ids, which
    depend on the chat template too."""

    id: str
    data: Any
    content: str | None = None
    given: str | None = None


@dataclass(frozen=True)
class Result:
    """Result of one reader on one sample.

    - metrics: by name, as fractions, not percent.
    - tokens: number of tokens read.
    - footprint: bytes held at that length.
    - details: for inspection, for example the answer and the expected one.
    """

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
        """Compute the mean and its standard error s/√n."""
        mean = statistics.fmean(values) if values else math.nan
        spread = len(values) > 1 and all(map(math.isfinite, values))  # statistics.stdev does not accept NaN
        stderr = statistics.stdev(values) / math.sqrt(len(values)) if spread else math.nan
        return Estimate(mean, stderr)


@dataclass(frozen=True)
class Task(ABC):
    """A task with its options."""

    @property
    def more(self) -> tuple[str, ...]:
        """Metrics that tables show only on request."""
        return ()

    def about(self) -> str:
        """Describe the text that is read in plain words. The default lists the options by name."""
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ", ".join(f"{name} {value}" for name, value in said.items() if value not in ("", None))

    def check(self, reader: Reader) -> None:  # noqa: B027  # most tasks take every recipe
        """Check that the task's options allow the reader's recipe and model.

        Raises:
            UserError: they do not; the message names the option.
        """

    @abstractmethod
    def instances(self, reader: Reader) -> Sequence[Sample]:
        """Make the samples with the reader's tokenizer. They fit its context and depend on the seed
        only.

        Raises:
            UserError: invalid options, or missing data; the message says where to get it.
        """

    @abstractmethod
    def evaluate(self, sample: Sample, reader: Reader, full: Reader) -> Result:
        """Score `reader` on a sample. `full` reads the same with the full cache and may be `reader`
        itself."""

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """Return means over samples. `full` holds the full cache's metrics of the same samples in
        order."""
        return {name: Estimate.of([m[name] for m in metrics]) for name in (metrics[0] if metrics else {})}
