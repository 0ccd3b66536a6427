"""Records of `tersekv bench generate`: tokens per second of a cache after so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tersekv.lab.plots.benchmarks import Benchmark

GENERATE = Benchmark(
    "generate", "tersekv bench generate", "timing of decoding", ("model", "cache", "tokens_per_second"),
    ("tokens_per_second",),
)  # fmt: skip


class Setting(NamedTuple):
    """How a run decoded. prefill_chunk: tokens of a forward pass over the prompt, None if it was read whole. execution:
    how a step was run, "eager" or another word of the records."""

    dtype: str
    prefill_chunk: int | None
    execution: str

    def __str__(self) -> str:
        read = "prompt read whole" if self.prefill_chunk is None else f"prompt in chunks of {self.prefill_chunk:,}"
        return f"{self.dtype}, {read}" + ("" if self.execution == "eager" else f", {self.execution}")


class Rate(NamedTuple):
    """Tokens per second of one cache after one context: the median of all rounds, the slowest and the fastest. adds_ms:
    what the context adds to a step, the median; None in records that do not say."""

    model: str
    setting: Setting
    cache: str
    context: int
    middle: float
    low: float
    high: float
    adds_ms: float | None = None


def read_decodings(paths: Sequence[Path]) -> list[Rate]:
    """Every setting, cache and context in files of JSON lines, in order of first appearance; runs of the same are one.

    Raises:
        UserError: no file, or records of something else.
    """
    found: dict[tuple[str, Setting, str, int], tuple[list[float], list[float]]] = {}
    for row in GENERATE.read(paths):
        rates, adds = found.setdefault(_key(row), ([], []))
        rates += [1e3 / step for step in row["step_ms"]] if "step_ms" in row else row["rates"]
        adds += row.get("adds_ms", [])
    return [
        Rate(*key, median(rates), min(rates), max(rates), median(adds) if adds else None)
        for key, (rates, adds) in found.items()
    ]


def _key(row: dict[str, Any]) -> tuple[str, Setting, str, int]:
    """Earlier records name the context `depth`; they are of float32 weights and of prompts read whole."""
    setting = Setting(row.get("dtype", "float32"), row.get("prefill_chunk"), row.get("execution", "eager"))
    return row["model"], setting, row["cache"], row["context"] if "context" in row else row["depth"]
