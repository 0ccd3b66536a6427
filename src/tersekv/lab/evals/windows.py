"""Windows of a text, the samples of perplexity and divergence."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.calibration.text import pydoc_text
from tersekv.errors import UserError
from tersekv.lab.evals.tasks.base import Sample, Task

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

BUILT_IN = "pydoc"
Mode = Literal["cache", "simulate"]
POSITIONS_AT_A_TIME = 256
"""Number of positions whose distributions are computed at a time. It limits the memory for logits."""


@dataclass(frozen=True)
class WindowTask(Task):
    """Options of tasks that read windows of a text.

    - text: "pydoc" (the language reference in Python's standard library) or a file.
    - context: tokens per window.
    - windows: number of windows, from the start of the text; 0 for all.
    - mode: "cache" reads through the real cache: `prefix` tokens at once, then `chunk` at a time.
      "simulate" is one forward pass with every key and value quantised.
    - sinks: first tokens that mode=simulate leaves exact.
    - chunk: tokens of a forward pass after the prefix.
    - prefix: tokens that are packed at once and not scored.
    """

    text: str = BUILT_IN
    context: int = 2048
    windows: int = 4
    mode: Mode = "cache"
    sinks: int = 0
    chunk: int = 128
    prefix: int = 0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise UserError(f"mode={self.mode} is not allowed; choose cache or simulate")
        for name, low in (("context", 2), ("windows", 0), ("sinks", 0), ("chunk", 1), ("prefix", 0)):
            if getattr(self, name) < low:
                raise UserError(f"{name}={getattr(self, name)} is too small; give {low} or more")
        if self.mode == "simulate" and self.prefix:
            raise UserError(
                f"prefix={self.prefix} belongs to mode=cache; in mode=simulate every token is quantised: remove one of "
                "them"
            )
        if self.mode == "cache" and self.sinks:
            raise UserError(
                f"sinks={self.sinks} belongs to mode=simulate, and mode is cache: give mode=simulate, or set a real "
                "cache's sinks in the recipe, for example window:sinks=4+kivi:bits=2"
            )
        if self.prefix > self.context - 2:
            raise UserError(
                f"prefix={self.prefix} leaves nothing to score in a window of {self.context} tokens; give at most "
                f"{self.context - 2}"
            )

    def about(self) -> str:
        """Describe windows, text and mode in plain words."""
        count = "all" if self.windows == 0 else str(self.windows)
        read = f"{count} window{'' if self.windows == 1 else 's'} of {self.context:,} tokens of {Path(self.text).name}"
        if self.mode == "simulate":
            exact = f", the first {self.sinks} tokens exact" if self.sinks else ""
            return f"{read}, every key and value quantised in one pass{exact} (mode=simulate)"
        first = f"{self.prefix:,} packed at once, the others scored " if self.prefix else ""
        return f"{read}, {first}{self.chunk} tokens at a time through the real cache (mode=cache)"

    def check(self, reader: Reader) -> None:
        """Check that mode=simulate takes the recipe."""
        if self.mode == "simulate":
            reader.check_simulated("mode=cache")

    def instances(self, reader: Reader) -> Sequence[Sample]:
        """Return the first windows of the text. `data` is ids [1, context], and the id contains a
        hash of them."""
        if self.context > reader.context_tokens:
            raise UserError(
                f"context={self.context:,} exceeds the model's {reader.context_tokens:,} tokens: give fewer"
            )
        text = read_text(self.text)
        ids = torch.tensor([reader.tokenizer(text, verbose=False)["input_ids"]])
        whole = ids.shape[1] // self.context
        if whole < max(1, self.windows):
            raise UserError(
                f"text {self.text!r} has {ids.shape[1]:,} tokens, {whole} windows of {self.context:,}, but "
                f"{max(1, self.windows)} are needed: give fewer windows, a shorter context or a longer text"
            )
        windows = ids[:, : whole * self.context].split(self.context, dim=1)[: self.windows or whole]
        return [Sample(f"{i}-{_digest(window)}", window) for i, window in enumerate(windows)]

    def logits(self, sample: Sample, reader: Reader) -> tuple[Tensor, Footprint]:
        """Return logits [T, vocabulary] of a window, and the size of the cache."""
        if self.mode == "simulate":
            return reader.simulate(sample.data, self.sinks)
        return reader.read(sample.data, self.chunk, self.prefix)


def read_text(text: str) -> str:
    """Return the built-in text or the text of a file."""
    if text == BUILT_IN:
        return pydoc_text()
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the text {text!r}: {why}; give a file, or {BUILT_IN}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{text} is not UTF-8 text (byte {error.start}): convert it first") from error


def _digest(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]
