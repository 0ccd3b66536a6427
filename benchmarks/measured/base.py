"""Parts of the pages of docs/measured: sections with a table, its records and the command that makes them."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recorded import RECORDS, Row
from tersekv.lab.evals import runs

MODELS = {
    "smollm2": "SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct": "SmolLM2-135M",
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-0.5B-Instruct": "Qwen2.5-Coder-0.5B",
    "google/gemma-3-270m": "Gemma 3 270M", "gemma-3-270m": "Gemma 3 270M",
}  # fmt: skip
"""Names of models in tables, by their names in records."""
NAMES = {
    "full": "full cache", "quanto-4": "quanto, 4 bits", "hqq-4": "HQQ, 4 bits",
    "trellis:bits=3.5,calibration=prompt": "`default`", "trellis:bits=4,calibration=prompt": "`safe`",
    "mixed:allot=prompt,bias_correction=full+trellis:bits=1.7,calibration=prompt": "`small`",
}  # fmt: skip
"""Names of caches in tables that are not their recipe."""

BY_LAYER = {None, "c2a3663", "4ec6f08", "9c9df46", "640f464-dirty", "06eb49a-dirty", "1def017"}
"""Commits at which all heads of a layer had the same rates under `mixed`. None: older runs, without a commit."""
ANY_SHARE = {"6cab601", "492a520", "19f13f10"}
"""Later commits at which `allot=prompt` could give almost all tokens of a head its higher rate."""
DIAGONAL = ANY_SHARE | {"94007a45", "9990bd26", "f53e82b2", "efc2c359"}
"""Commits at which keys with two rates were fitted to the diagonal of the metric of their queries."""


@dataclass(frozen=True)
class Section:
    """A part of a page: a title, a few sentences, a table or more, and where its numbers are from.

    records: files below benchmarks/records. command: how they are made. level: of the heading.
    """

    title: str
    note: str
    body: str
    records: Sequence[str] = ()
    command: str = ""
    level: int = 2

    def below(self) -> Section:
        """Return the section with a heading one level lower."""
        return replace(self, level=self.level + 1)

    def __str__(self) -> str:
        parts = [f"{'#' * self.level} {self.title}", wrapped(self.note), self.body]
        if self.records:
            files = ", ".join(f"`{name}`" for name in self.records)
            parts.append(
                wrapped(f"Record{'s' * (len(self.records) > 1)}: {files}{', made by' if self.command else '.'}")
            )
        if self.command:
            parts.append(f"```\n{self.command}\n```")
        return "\n\n".join(filter(None, parts))


@dataclass(frozen=True)
class Page:
    """A page: its title, one sentence on what it shows, for the list of pages, more sentences, and its sections."""

    title: str
    shows: str
    note: str
    sections: Sequence[Any]

    def __str__(self) -> str:
        parts = [f"# {self.title}", wrapped(self.note), *map(str, self.sections)]
        return "\n\n".join(filter(None, parts)) + "\n"


def rows(*names: str) -> list[Row]:
    """Return the rows of files of records."""
    return [row for name in names for row in runs.read(RECORDS / name)]


def earlier(row: Row) -> str:
    """Return a note for a row whose rates were chosen in an earlier way, else nothing."""
    commit, recipe = row.get("commit"), row["recipe"]
    if "allot=" not in recipe:
        return ""
    if commit in BY_LAYER:
        return " (rates by layer)"
    if "allot=prompt" in recipe and commit in ANY_SHARE:
        return " (any share)"
    return " (diagonal metric)" if commit in DIAGONAL else ""


def wrapped(text: str) -> str:
    """Return paragraphs and lists in lines of at most 100 columns."""
    made = []
    for line in text.strip().split("\n"):
        indent = "  " if line.startswith("- ") else ""
        made.append(textwrap.fill(line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))
    return "\n".join(made)


def model(row: Row) -> str:
    """Return the name of a row's model."""
    return MODELS.get(row["model"], row["model"])


def cache(recipe: str) -> str:
    """Return the name of a cache."""
    return NAMES.get(recipe, f"`{recipe}`")


KINDS = {
    "family 25, model 1)": "Zen 3",
    "family 26,": "Zen 5",
    "family 6, model 85)": "Skylake",
    "family 6, model 106)": "Ice Lake",
    "family 6, model 167)": "Xeon with AMX, model 167",
}
"""Kinds of CPU by their family, and the model where a family has several."""


def cpu(row: Row) -> str:
    """Return the kind of CPU that a row of a benchmark was measured on. Those without a family were made by AMD, unless
    they have AMX."""
    named = next((kind for family, kind in KINDS.items() if family in row["cpu"]), None)
    return named or {"avx512bf16": "Zen 4", "avx512": "Zen 5", "amx": "Xeon with AMX"}[row["isa"]]


def middle(values: Sequence[float]) -> str:
    """Return the median."""
    return f"{statistics.median(values):,.1f}"


def span(values: Sequence[float], digits: int = 2) -> str:
    """Return the least and the largest value, once if they are written alike."""
    ends = [f"{end:.{digits}f}" for end in (min(values), max(values))]
    return "–".join(dict.fromkeys(ends))


def estimate(found: Any, digits: int = 4) -> str:
    """Return a mean with its standard error, if there are several samples and an error."""
    mean = f"{found.mean:.{digits}f}"
    return f"{mean} ± {found.stderr:.{digits}f}" if found.stderr > 0 else mean
