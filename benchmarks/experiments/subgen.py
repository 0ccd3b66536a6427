"""Experiments of SubGen (arXiv 2402.06082), and selection with codecs at equal bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean
from typing import Any

from experiments.base import ROUNDS, Column, Experiment, Questions, Result, Setting
from tersekv.calibration.capture import capture
from tersekv.errors import UserError
from tersekv.hf.facts import load_shape
from tersekv.lab.evals.haystack import prompt_tokens
from tersekv.lab.evals.options import build
from tersekv.lab.evals.questions import answered, read_questions
from tersekv.lab.evals.reader import Reader
from tersekv.lab.evals.records import FILE, Record
from tersekv.lab.evals.tasks import Task
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.plots.kinds.clusters import COUNTS, MEASURES, SIDES, reaches
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict

SIZES = "recipes.json"
"""File of a column's folder with its fitted recipes, so that a later run continues with the same."""
SMALLEST = 40
"""Smallest number of tokens that a selection keeps: sinks, the latest 32, and a few more."""


@dataclass(frozen=True)
class Cell:
    """Options of a column, and the room of its caches as a share of the prompt's bytes in 16 bits."""

    options: dict[str, str]
    room: str
    task: str = "lines"


@dataclass(frozen=True)
class EqualBytes(Questions):
    """Questions asked over caches of equal size.

    cells: the columns by label. rows: recipes with one open number {n}: tokens kept, or the exact
    window of a codec; {half} is half of it. The number is as large as the room allows for the first
    prompt. Codes, scales, tables, exact tokens, positions and scores count; spare capacity of buffers
    does not. A row whose smallest size exceeds the room is omitted.
    """

    cells: dict[str, Cell] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("accuracy", "gold_nll")

    def columns(self, setting: Setting) -> list[Column]:
        """Return the columns of this run."""
        if unknown := [label for label in setting.values if label not in self.cells]:
            raise UserError(f"no column {unknown[0]!r}: choose from {'; '.join(self.cells)}")
        return [
            Column(label, cell.task, self.options | cell.options | setting.options)
            for label, cell in self.cells.items()
            if not setting.values or label in setting.values
        ]

    def run(self, setting: Setting) -> None:
        """Ask every question that has no record yet, in rounds of more and more samples."""
        most = setting.samples or self.samples
        parts = [self._part(column, setting) for column in self.columns(setting)]
        for count in [*(n for n in ROUNDS if n < most), most]:
            for part in parts:
                part.run(_same_model(setting, count))

    def results(self, setting: Setting) -> list[Result]:
        """Return means over the samples that all recipes of a column have."""
        found: list[Result] = []
        for column in self.columns(setting):
            if (self._folder(setting, column) / FILE).exists():
                found += self._part(column, setting).results(_same_model(setting, None))
        return found

    def _part(self, column: Column, setting: Setting) -> _OneColumn:
        rows = self._fitted(column, setting)
        given = {name: getattr(self, name) for name in ("title", "protocol", "quoted", "samples", "metrics", "full")}
        return _OneColumn(**given, rows=rows, column=column)

    def _fitted(self, column: Column, setting: Setting) -> dict[str, str]:
        """Return the recipes of a column by label, with the numbers of an earlier run if there was one."""
        rows, path = setting.chosen(self.rows), self._folder(setting, column) / SIZES
        known: dict[str, str | None] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        if any(label not in known for label in rows):
            reader = Reader(*setting.loaded)
            first: Any = build([column.task], column.options | {"samples": "1"})[column.task].instances(reader)[0]
            shape, tokens = load_shape(setting.model, with_weights=False)[0], prompt_tokens(reader, first.data.prompt)
            room = float(Fraction(self.cells[column.label].room))
            known |= {label: fitted(text, shape, tokens, room) for label, text in rows.items() if label not in known}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known, indent=1), "utf-8")
        return {label: recipe for label in rows if (recipe := known[label])}


@dataclass(frozen=True)
class _OneColumn(Questions):
    """One column of `EqualBytes`, with its recipes."""

    column: Column | None = None

    def columns(self, setting: Setting) -> list[Column]:
        return [self.column] if self.column else []

    def _column(self, label: str, task: Task, records: Sequence[Record], rows: dict[str, str]) -> Iterator[Result]:
        return super()._column(label, task, [_without_slack(record) for record in records], rows)


def _without_slack(record: Record) -> Record:
    """Return a record with bytes and bits that do not count spare capacity."""
    used = record["bytes"] - record["bytes_by_part"].get("slack", 0)
    return record | {"bytes": used, "bits_per_element": record["bits_per_element"] * used / record["bytes"]}


def _same_model(setting: Setting, samples: int | None) -> Setting:
    """Return the setting for all rows and other samples, with the model that is loaded already."""
    other = replace(setting, samples=samples, rows=(), values=())
    if "loaded" in vars(setting):
        vars(other)["loaded"] = setting.loaded
    return other


def held(shape: CacheShape, recipe: str, tokens: int) -> float:
    """Return a recipe's share of 16-bit bytes after a prompt, without slack."""
    footprint = predict(shape, recipe, tokens)
    return (footprint.total_bytes - footprint.parts["slack"]) / (2 * footprint.elements)


def fitted(template: str, shape: CacheShape, tokens: int, room: float) -> str | None:
    """Return the template with a number that fits the room while the next larger one does not.

    Returns None if the smallest number does not fit. Bytes do not grow monotonically with the
    number, because an incomplete block of 32 tokens stays exact.
    """
    low, high = (0 if template.startswith("window") else SMALLEST), tokens
    if held(shape, _with(template, low), tokens) > room:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        fits = held(shape, _with(template, middle), tokens) <= room
        low, high = (middle, high) if fits else (low, middle)
    return _with(template, low)


def _with(template: str, n: int) -> str:
    return template.format(n=n, half=n // 2)


QUESTIONS = "mt_bench/question.jsonl"
FIGURE_1 = "figure1.jsonl"


@dataclass(frozen=True)
class Clusters(Experiment):
    """Distances of keys and values to greedy k-centers, for questions and the model's answers.

    questions: number of questions, spread evenly over the file. new_tokens: maximum of an answer.
    """

    questions: int = 10
    new_tokens: int = 256

    def run(self, setting: Setting) -> None:
        """Measure the questions that have no record yet."""
        source = setting.text(QUESTIONS)
        texts = read_questions(source)
        count = min(setting.samples or self.questions, len(texts))
        path = setting.folder / FIGURE_1
        path.parent.mkdir(parents=True, exist_ok=True)
        done = {record["question"] for record in self._records(setting)}
        for id in [list(texts)[i * len(texts) // count] for i in range(count)]:
            if id in done:
                continue
            setting.check_time()
            model, tokenizer = setting.loaded
            ids = answered(model, tokenizer, texts[id], self.new_tokens)
            layers = [
                {side: [reach._asdict() for reach in reaches(x[0].float())] for side, x in zip(SIDES, one, strict=True)}
                for one in capture(model, ids)
            ]
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"question": id, "tokens": ids.shape[1], "layers": layers}) + "\n")
            print(f"question {id}: {ids.shape[1]} tokens", flush=True)

    def _records(self, setting: Setting) -> list[dict[str, Any]]:
        path = setting.folder / FIGURE_1
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []

    def results(self, setting: Setting) -> list[Result]:
        """Return means over questions of the means over layers, and the share of layers in which keys
        have the smaller one."""
        records, found = self._records(setting), []
        for measure, at in itertools.product(MEASURES, range(len(COUNTS))):
            sides = {
                side: [[layer[side][at][measure] for layer in record["layers"]] for record in records] for side in SIDES
            }
            rows = {side: [fmean(layers) for layers in of] for side, of in sides.items()}
            rows["share of layers where keys have the smaller one"] = [
                fmean(k < v for k, v in zip(*layers, strict=True)) for layers in zip(*sides.values(), strict=True)
            ]
            for row, of in rows.items():
                if of:
                    mean, stderr = Estimate.of(of)
                    error, wanted = (stderr if len(of) > 1 else None), max(self.questions, len(of))
                    place = row, f"{COUNTS[at]} centers", MEASURES[measure]
                    found.append(Result(*place, mean, error, len(of), wanted, values=tuple(of)))
        return found


TABLE_1 = {
    "attention sinks": "streaming:budget={n}+exact",
    "H2O": "h2o:budget={n},recent=32+exact",
    "SubGen": "subgen:budget={n},recent={half}+exact",
    "SubGen, 32 recent tokens": "subgen:budget={n},recent=32+exact",
    "SubGen, Algorithm 1": "subgen:variant=stream,budget={n},recent={half}+exact",
}
"""The paper's rows. It does not say how many of the kept tokens are recent ones: here half, as in H2O,
or 32."""
BOTH = {
    "TurboQuant, 1 bit": "window:recent={n}+turboquant:bits=1",
    "TurboQuant, 2 bits": "window:recent={n}+turboquant:bits=2",
    "KIVI, 2 bits": "window:recent={n}+kivi:bits=2",
    "attention sinks": "streaming:budget={n}+exact",
    "H2O": "h2o:budget={n},recent=32+exact",
    "SnapKV": "snapkv:budget={n}+exact",
    "PyramidKV": "pyramidkv:budget={n}+exact",
    "SubGen": "subgen:budget={n},recent=32+exact",
    "H2O, TurboQuant 4 bits": "h2o:budget={n},recent=32+turboquant:bits=4",
    "SnapKV, TurboQuant 4 bits": "snapkv:budget={n}+turboquant:bits=4",
    "SubGen, TurboQuant 4 bits": "subgen:budget={n},recent=32+turboquant:bits=4",
    "SubGen, TurboQuant 2 bits": "subgen:budget={n},recent=32+turboquant:bits=2",
    "SubGen, KIVI 4 bits": "subgen:budget={n},recent=32+kivi:bits=4",
}
"""Codecs alone, selection alone, and both combined."""
ROOM = (
    "Every cache may take the share of the prompt's bytes in 16 bits that its column says. Codes, scales, tables, "
    "exact tokens, positions and scores count. True bits are those after the answer, without spare capacity."
)
QUOTED = (
    "longchat-7b, 5,000 / 7,000 / 9,000 tokens with 35 / 42 / 50 % less memory: exact .98 / 1.0 / .68; attention sinks "
    ".56 / .56 / .38; H2O .66 / .58 / .38; SubGen .86 / .66 / .44."
)
AFTER, BEFORE = {"pack": "after-prompt"}, {"pack": "before-question"}
LONGEVAL, PAIRS = {"variant": "longeval"}, {"variant": "pairs"}


def _lines(sizes: Sequence[tuple[int, str]], options: dict[str, str], order: str = "") -> dict[str, Cell]:
    """Return columns of numbers of lines and rooms."""
    return {f"{n} lines in {room}{order}": Cell(options | {"lines": str(n)}, room) for n, room in sizes}


ALGORITHM_1 = {
    "attention sinks, 1/2": "streaming:budget=512+exact",
    "k-center, 1/2": "subgen:budget=512+exact",
    "k-center, 64 sinks, 1/2": "subgen:budget=512,sinks=64+exact",
    "Algorithm 1, 1/2": "subgen:variant=stream,budget=559+exact",
    "Algorithm 1, 64 sinks, 1/2": "subgen:variant=stream,budget=541,sinks=64+exact",
    "Algorithm 1, 3/10 for values, 1/2": "subgen:variant=stream,budget=579,values=0.3+exact",
    "Algorithm 1, one slot, 1/2": "subgen:variant=stream,budget=507,slots=1+exact",
    "Algorithm 1, 7/10 for values, 1/2": "subgen:variant=stream,budget=553,values=0.7+exact",
    "Algorithm 1, TurboQuant 8 bits": "subgen:variant=stream,budget=559+turboquant:bits=8",
    "attention sinks, 1/4": "streaming:budget=256+exact",
    "k-center, 1/4": "subgen:budget=256+exact",
    "Algorithm 1, 1/4": "subgen:variant=stream,budget=257+exact",
    "Algorithm 1, 3/10 for values, 1/4": "subgen:variant=stream,budget=259,values=0.3+exact",
    "Algorithm 1, 7/10 for values, 1/4": "subgen:variant=stream,budget=255,values=0.7+exact",
}
"""Caches of equal bytes after 1,024 tokens. Algorithm 1 names some tokens twice, so its budget is larger."""


EXPERIMENTS: dict[str, Experiment] = {
    "figure1": Clusters(
        "Figure 1: clusters of keys and of values",
        "Questions of MT-Bench with 256 generated tokens; keys after RoPE and values of prompt and answer, all "
        "layers and heads. Distances to the nearest greedy k-center, divided by the mean distance of two vectors: the "
        "largest (k-center radius) and the mean. `tersekv plot clusters --questions FILE` draws one question.",
        "Llama-2-7B, t-SNE without figures: keys form clusters, values do not.",
    ),
    "algorithm1": Questions(
        "Algorithm 1 on a model",
        "1,024 tokens of wikitext-2 test are packed into 1/2 or 1/4 of their bytes in 16 bits, then 256 tokens are "
        "read 64 at a time and compared with the full cache. These tokens add different amounts to each cache.",
        "Not in the paper: its experiments use k-center.",
        task="divergence",
        options={"text": "{data}/wikitext-2/test_gptq_joined.txt", "mode": "cache", "context": "1280", "chunk": "64"},
        axis="prefix",
        values=("1024",),
        rows=ALGORITHM_1,
        samples=8,
        count="windows",
        metrics=("kl", "perplexity_ratio"),
    ),
    "table1": EqualBytes(
        "Table 1: line retrieval",
        "LongEval's lines and wording, 50 samples. The whole prompt is read exactly, then the cache is reduced, then "
        f"the answer is generated (`--pack after-prompt`). {ROOM}",
        QUOTED,
        cells=_lines([(10, "13/20"), (5, "1/2"), (10, "1/2"), (20, "1/2"), (40, "1/2"), (20, "1/4")], LONGEVAL | AFTER),
        rows=TABLE_1,
    ),
    "table1-unseen": EqualBytes(
        "Table 1 with an unknown question",
        f"As Table 1, but the lines are packed before the question is read. {ROOM}",
        "Not in the paper.",
        cells=_lines([(10, "13/20"), (10, "1/2"), (20, "1/2")], LONGEVAL | BEFORE),
        rows=TABLE_1,
    ),
    "table1-pairs": EqualBytes(
        "Table 1 in a shorter wording",
        "Pairs of a name and a number (`variant=pairs`), for models that do not understand LongEval's wording; packed "
        f"after the prompt as in Table 1, or before the question is read. {ROOM}",
        "Not in the paper.",
        cells=_lines([(20, "1/2"), (20, "1/4")], PAIRS | AFTER, " after the prompt")
        | _lines([(20, "1/2"), (20, "1/4")], PAIRS | BEFORE, " before the question"),
        rows=TABLE_1,
    ),
    "selection": EqualBytes(
        "Selection, codecs and both",
        f"Evict tokens, pack all of them, or do both? The context is packed before the question is read. {ROOM}",
        "Not in the paper.",
        cells={
            "passkey 1k in 1/6": Cell(BEFORE | {"lengths": "1k"}, "1/6", "passkey"),
            "passkey 2k in 1/8": Cell(BEFORE | {"lengths": "2k"}, "1/8", "passkey"),
            "40 pairs in 1/5": Cell(PAIRS | BEFORE | {"lines": "40"}, "1/5"),
        },
        rows=BOTH,
        samples=20,
    ),
}
