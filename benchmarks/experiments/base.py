"""Experiments of papers: code that the other files of this folder share.

An experiment is one table or figure of a paper. It runs with a model, can be stopped and continued,
and returns results: one number per row, column and metric. Raw records stay in the folder `out`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from recorded import median_of, record
from tersekv import cli
from tersekv.calibration.find import place, profile_place
from tersekv.calibration.needs import needs_corpus, needs_profile, profile_of
from tersekv.errors import UserError
from tersekv.lab.evals import runs
from tersekv.lab.evals.harness import Harness, Progress, metrics_of
from tersekv.lab.evals.options import build
from tersekv.lab.evals.reader import FULL
from tersekv.lab.evals.records import FILE, Record, Records, read
from tersekv.lab.evals.tasks import Task
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.models.loading import load, load_config
from tersekv.recipe import Recipe

T = TypeVar("T")

ROUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
"""Numbers of samples. Every cell gets as many before any gets more, so a stopped run is even."""


RESULTS = "results.jsonl"
MEASURED_DEFAULT = "trellis:bits=3,calibration=prompt"
"""The preset when rows named `default` were measured. It has 3.5 bits now."""

TRAIN = "wikitext-2/train_first1MB.gptq_joined.txt"


class OutOfTimeError(Exception):
    """The hours of the run are used up."""


@dataclass
class Setting:
    """Options of a run.

    - model: name, folder or Hub id. dtype: of its weights. threads: of torch.
    - out: folder of raw records. data: folder of texts and question sets.
    - samples: per cell; None for the paper's number. hours: time limit; None for none.
    - values: columns to run in place of the paper's, for example lengths. rows: labels to run; empty
      for all. options: of the evaluation, in place of the paper's.
    """

    model: str
    dtype: str
    out: Path
    data: Path | None = None
    calibration: Path | None = None
    samples: int | None = None
    hours: float | None = None
    values: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """The model and its tokenizer, loaded on first use."""
        return load(self.model, self.dtype)

    @property
    def folder(self) -> Path:
        """Folder of this model's records."""
        return self.out / f"{self.model.replace('/', '--')}-{self.dtype}"

    def chosen(self, rows: Mapping[str, T]) -> dict[str, T]:
        """Return the rows to run, by label.

        Raises:
            UserError: no row has one of the chosen labels.
        """
        if unknown := [label for label in self.rows if label not in rows]:
            raise UserError(f"no row {unknown[0]!r}: choose from {'; '.join(rows)}")
        return {label: of for label, of in rows.items() if not self.rows or label in self.rows}

    def check_time(self) -> None:
        """Stop the run if its hours are used up.

        Raises:
            OutOfTimeError: they are.
        """
        if self.hours is not None and time.monotonic() - self.started > 3600 * self.hours:
            raise OutOfTimeError

    def text(self, name: str) -> str:
        """Return the path of a file in the data folder.

        Raises:
            UserError: there is no such file.
        """
        path = None if self.data is None else self.data / name
        if path is None or not path.exists():
            raise UserError(f"this experiment reads {name}: give the folder that holds it with --data")
        return str(path)


@dataclass(frozen=True)
class Result:
    """One number of an experiment.

    stderr: standard error, None for one sample. bits, bytes: of the cache, everything counted. wanted:
    number of samples of the full experiment. values: of each sample, in the same order for all rows of a column; of
    times and of perplexities and their ratios the logarithm.
    """

    row: str
    column: str
    metric: str
    mean: float
    stderr: float | None = None
    samples: int = 1
    wanted: int = 1
    bits: float | None = None
    bytes: int | None = None
    recipe: str = ""
    values: tuple[float, ...] = ()

    @staticmethod
    def of_times(row: str, column: str, metric: str, taken: Sequence[float], **more: Any) -> Result:
        """Return the median of times, one per round in which all rows take turns. more: further fields."""
        n, logarithms = len(taken), tuple(round(math.log(x), 5) for x in taken)
        return Result(row, column, metric, median_of(taken), None, n, n, values=logarithms, **more)


@dataclass(frozen=True)
class Experiment(ABC):
    """A table or figure of a paper.

    - title: subject. protocol: how the paper measures, and differences here.
    - quoted: the paper's figures in markdown.
    """

    title: str
    protocol: str
    quoted: str

    @abstractmethod
    def run(self, setting: Setting) -> None:
        """Run what is missing. It may be stopped at any time.

        Raises:
            OutOfTimeError: the hours are used up.
            UserError: missing data, or a recipe that does not support the model.
        """

    @abstractmethod
    def results(self, setting: Setting) -> list[Result]:
        """Return the results of the raw records that exist."""


@dataclass(frozen=True)
class Column:
    """A column of `Questions`: an evaluation task with its options."""

    label: str
    task: str
    options: dict[str, str]


@dataclass(frozen=True)
class Questions(Experiment):
    """Questions asked over several caches.

    - task, options: of `tersekv eval`. In options, {data} is the data folder.
    - axis: the option that differs between columns. values: the paper's. mean: True for a column with
      their mean.
    - rows: recipes by label. The full cache is added as the first row. Those that need a calibration
      corpus are calibrated first.
    - samples: the paper's number per column. count: the option that sets it. metrics: shown ones.
    """

    task: str = "passkey"
    options: dict[str, str] = field(default_factory=dict)
    axis: str = "lengths"
    values: tuple[str, ...] = ()
    rows: dict[str, str] = field(default_factory=dict)
    samples: int = 50
    count: str = "samples"
    metrics: tuple[str, ...] = ("accuracy",)
    full: str = "full cache"
    mean: bool = False

    def columns(self, setting: Setting) -> list[Column]:
        """Return the columns of this run."""
        folder = str(setting.data or "")
        options = {name: text.replace("{data}", folder) for name, text in (self.options | setting.options).items()}
        return [Column(value, self.task, options | {self.axis: value}) for value in setting.values or self.values]

    def run(self, setting: Setting) -> None:
        """Ask every question that has no record yet, in rounds of more and more samples."""
        recipes = setting.chosen(self.rows)
        folder = calibrated(list(recipes.values()), setting)
        model, tokenizer = setting.loaded
        run = Harness(model, tokenizer, setting.model, list(recipes.values()), folder)
        most = setting.samples or self.samples

        def progress(at: Progress) -> None:
            setting.check_time()
            print(f"\r{at.done}/{at.total} {at.task} {at.sample} {at.recipe[:60]:60}", end="", flush=True)

        columns = [column for column in self.columns(setting) if self._fits(column, run)]
        for count in [*(n for n in ROUNDS if n < most), most]:
            for column in columns:
                tasks = build([column.task], column.options | {self.count: str(count)})
                with Records(self._folder(setting, column)) as records:
                    run.run(tasks, records, progress)

    def results(self, setting: Setting) -> list[Result]:
        """Return means over the samples that all recipes have."""
        found: list[Result] = []
        for column in self.columns(setting):
            folder = self._folder(setting, column)
            if not (folder / FILE).exists():
                continue
            task = build([column.task], column.options)[column.task]
            rows = {
                self.full: FULL,
                **{label: str(Recipe.parse(text)) for label, text in setting.chosen(self.rows).items()},
            }
            found += self._column(column.label, task, read(folder), rows)
        return found + (list(self._means(found)) if self.mean else [])

    def _means(self, found: Sequence[Result]) -> Iterator[Result]:
        """Yield the mean over columns of each row that has all of them, and of each metric. One column needs none.

        Columns are independent of each other.
        """
        columns = len({r.column for r in found})
        if columns == 1:
            return
        for row, metric in dict.fromkeys((r.row, r.metric) for r in found):
            of = [r for r in found if (r.row, r.metric) == (row, metric)]
            if (n := len(of)) < columns:
                continue
            errors = [r.stderr for r in of if r.stderr is not None]
            error = math.sqrt(sum(x * x for x in errors)) / n if len(errors) == n else None
            mean, bits = (sum(x) / n for x in (([r.mean for r in of]), [r.bits or 0.0 for r in of]))
            fewest = min(r.samples for r in of)
            yield replace(
                of[0], column="mean", mean=mean, stderr=error, samples=fewest, bits=bits, bytes=None, values=()
            )

    def _column(self, label: str, task: Task, records: Sequence[Record], rows: dict[str, str]) -> Iterator[Result]:
        by_recipe: dict[str, dict[str, Record]] = {}
        for one in records:
            by_recipe.setdefault(one["recipe"], {})[one["sample"]] = one
        there = {name: by_recipe[recipe] for name, recipe in rows.items() if recipe in by_recipe}
        common = set.intersection(*(set(of) for of in there.values())) if there else set()
        samples = [sample for sample in there.get(self.full, ()) if sample in common]  # one order for all rows
        for name, of in there.items() if samples else ():
            ours, full = ([row[sample] for sample in samples] for row in (of, there[self.full]))
            summary = task.summarise([metrics_of(r) for r in ours], [metrics_of(r) for r in full])
            bits = sum(r["bits_per_element"] for r in ours) / len(ours)
            held = round(sum(r["bytes"] for r in ours) / len(ours))
            for metric in self.metrics:
                mean, stderr = summary.get(metric, Estimate(math.nan, math.nan))
                if math.isfinite(mean):
                    error = stderr if math.isfinite(stderr) else None
                    wanted = max(self.samples, len(ours))
                    values = values_of(metric, ours)
                    yield Result(name, label, metric, mean, error, len(ours), wanted, bits, held, rows[name], values)

    def _fits(self, column: Column, run: Harness) -> bool:
        """True if the model's context is long enough for a column."""
        try:
            build([column.task], column.options | {self.count: "1"})[column.task].instances(run.full)
        except UserError as error:
            if "context" not in str(error):
                raise
            print(f"{column.label} is left out: {error}", flush=True)
            return False
        return True

    def _folder(self, setting: Setting, column: Column) -> Path:
        return setting.folder / column.label.replace("/", "-")


@dataclass(frozen=True)
class Measured(Experiment):
    """A measurement that is done in one go, for example of times.

    measure: function that returns the results. It should compare everything in one run, in turns.
    """

    measure: Callable[[Setting], list[Result]] = lambda _: []

    def run(self, setting: Setting) -> None:
        """Measure, and keep the results."""
        results = self.measure(setting)
        (setting.folder / RESULTS).unlink(missing_ok=True)
        record(setting.folder / RESULTS, {}, map(asdict, results))

    def results(self, setting: Setting) -> list[Result]:
        """Return the results of the last measurement."""
        path = setting.folder / RESULTS
        names = [field.name for field in fields(Result)]
        return [Result(**{name: row[name] for name in names}) for row in (runs.read(path) if path.exists() else [])]


@dataclass(frozen=True)
class Corpus:
    """Samples that recipes are calibrated on; by default KVQuant's (§4).

    text: file in the data folder. sinks: tokens left out at the start of each sample. seed: of the samples' places.
    """

    text: str = TRAIN
    samples: int = 16
    length: int = 2048
    sinks: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        """Return the name of its folder of calibrations."""
        more = ("" if self.sinks == 1 else f"-sinks{self.sinks}") + (f"-seed{self.seed}" if self.seed else "")
        return f"{self.text.partition('/')[0]}-{self.samples}x{self.length}{more}"


KVQUANT_CORPUS = Corpus()


def calibrated(recipes: Sequence[str], setting: Setting, corpus: Corpus = KVQUANT_CORPUS) -> Path | None:
    """Calibrate the recipes that need it and have no file yet. Without a data folder `pydoc` takes
    the place of wikitext-2.

    Return the folder of calibrations, or None if no recipe needs one.
    """
    config = load_config(setting.model)
    parsed = {text: Recipe.parse(text) for text in recipes}
    learning = [
        text for text, recipe in parsed.items() if needs_corpus(recipe, config) or needs_profile(recipe, config)
    ]
    if not learning:
        return setting.calibration
    folder = setting.calibration or setting.out.parent / "calibrations" / setting.model.replace("/", "--")
    if corpus != KVQUANT_CORPUS:
        folder = folder / corpus.name
    folder.mkdir(parents=True, exist_ok=True)

    def done(recipe: Recipe) -> bool:
        of_codecs = not needs_corpus(recipe, config) or place(folder, recipe).exists()
        return of_codecs and (not needs_profile(recipe, config) or profile_place(folder, profile_of(recipe)).exists())

    missing = [text for text in learning if not done(parsed[text])]
    if missing:
        named = [part for text in missing for part in ("-r", text)]
        text = "pydoc" if setting.data is None and corpus.text == TRAIN else setting.text(corpus.text)
        drawn = {name: value for name, value in asdict(corpus).items() if name != "text"}
        size = [part for name, value in drawn.items() for part in (f"--{name}", str(value))]
        status = cli.run(["calibrate", "-m", setting.model, *named, *size, "--text", text, "--out", str(folder)])
        if status:
            raise UserError("the calibration failed; its message is above")
    return folder


def values_of(metric: str, ours: Sequence[Record]) -> tuple[float, ...]:
    """Return the metric of each sample, see `Result`; none if a sample lacks it."""
    name = "nll" if metric.startswith("perplexity") else metric
    found = [record["metrics"].get(name) for record in ours]
    return () if None in found else tuple(float(f"{x:.6g}") for x in found)
