"""What a kind of picture is: what it reads, and a function that draws it and says in figures what it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Reads = Literal["keys", "evaluation", "timings", "decodings", "streams", "bytes"]


class KeyFigures(NamedTuple):
    """A table for the terminal: the numbers that the picture shows. The first `left` columns are text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left: int = 1


class Picture(NamedTuple):
    """A drawing, a sentence for readers who do not see it, and its key figures."""

    figure: Figure
    alt: str
    tables: Sequence[KeyFigures]


def model_name(model: str) -> str:
    """A model for a title: a folder's own name, a known name or a Hub id as it is."""
    return Path(model).name if model.startswith((".", "~", "/")) or model.count("/") > 1 else model


class ModelKeys(NamedTuple):
    """A model's keys of one text, after RoPE, and its values.

    keys, values: of every attention layer, float32 [Hkv, T, D]. layers: those to look at. head: the one KV head to look
    at, None for all. text: where the tokens come from.
    """

    model: str
    text: str
    keys: Sequence[Tensor]
    layers: Sequence[int]
    head: int | None = None
    values: Sequence[Tensor] = ()

    def of(self, layer: int) -> Tensor:
        """The chosen heads' keys of a layer, [H, T, D]."""
        return self._heads(self.keys[layer])

    def values_of(self, layer: int) -> Tensor:
        """Their values, [H, T, Dv]."""
        return self._heads(self.values[layer])

    def _heads(self, x: Tensor) -> Tensor:
        return x if self.head is None else x[self.head : self.head + 1]

    def caption(self) -> str:
        """Model, length and source, for a title."""
        heads = "all KV heads" if self.head is None else f"KV head {self.head}"
        return f"{model_name(self.model)}, {self.keys[0].shape[1]:,} tokens of {Path(self.text).name}, {heads}"


@dataclass(frozen=True)
class Plot:
    """A file of `kinds/`: its `PLOT` says what the file's name draws.

    reads: "keys" (a `ModelKeys`), "evaluation" (records of `tersekv eval`), "bytes" (`Held`, of such records or
    predicted), "timings" (`Timing`, of a benchmark of attention), "decodings"
    (`Rate`, of one of decoding) or "streams" (`StreamStep`, of one of growing caches). draw:
    called with that and the options named in `options`. needs: packages of the extra `lab` besides matplotlib.
    """

    title: str
    reads: Reads
    draw: Callable[..., Picture]
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
