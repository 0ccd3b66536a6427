"""Read records of `tersekv bench generate`: decoding speed of a cache by context length."""

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
    """Settings of a decoding run.

    prefill_chunk: tokens per forward pass over the prompt, None if it was read whole. execution:
    how a step was run, "eager" or another value in the records.
    """

    dtype: str
    prefill_chunk: int | None
    execution: str

    def __str__(self) -> str:
        read = "prompt read whole" if self.prefill_chunk is None else f"prompt in chunks of {self.prefill_chunk:,}"
        return f"{self.dtype}, {read}" + ("" if self.execution == "eager" else f", {self.execution}")


class Rate(NamedTuple):
    """Decoding speed of one cache after one context, in tokens per second.

    middle, low, high: median, slowest and fastest of all rounds. adds_ms: median time that the
    context adds to a step, None for records without it.
    """

    model: str
    setting: Setting
    cache: str
    context: int
    middle: float
    low: float
    high: float
    adds_ms: float | None = None


def read_decodings(paths: Sequence[Path]) -> list[Rate]:
    """Return the speed for every setting, cache and context in the files, in order of first
    appearance.

    Repeated runs are merged.

    Raises:
        UserError: no file is given, or the files hold other records.
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
    """Return the identity of a row.

    Earlier records name the context `depth`. They used float32 weights and read prompts whole.
    """
    setting = Setting(row.get("dtype", "float32"), row.get("prefill_chunk"), row.get("execution", "eager"))
    return row["model"], setting, row["cache"], row["context"] if "context" in row else row["depth"]
