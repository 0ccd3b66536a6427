"""Types of plots: the data that a kind of plot reads, and the figure and tables that it makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Reads = Literal["keys", "activations", "evaluation", "timings", "decodings", "streams", "bytes"]


class KeyFigures(NamedTuple):
    """A table of the plotted numbers for the terminal. The first `left` columns are aligned left."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left: int = 1


class Picture(NamedTuple):
    """A figure, its alternative text, and tables of its numbers."""

    figure: Figure
    alt: str
    tables: Sequence[KeyFigures]


def model_name(model: str) -> str:
    """Return a model's name for a title: the last part of a folder, otherwise the name or Hub id."""
    return Path(model).name if model.startswith((".", "~", "/")) or model.count("/") > 1 else model


def short_count(tokens: int) -> str:
    """Format a number of tokens: 1k is 1,024 and 1M is 1,024²."""
    size, unit = next(((size, unit) for size, unit in ((1 << 20, "M"), (1 << 10, "k")) if tokens % size == 0), (1, ""))
    return f"{tokens // size:,}{unit}"


class ModelKeys(NamedTuple):
    """A model's keys (after RoPE) and values for one text.

    - keys, values: one tensor per attention layer, float32 [Hkv, T, D].
    - layers: the layers to plot.
    - head: the KV head to plot, None for all.
    - text: the source of the tokens.
    - before: keys before RoPE, only for kinds that read "activations".
    """

    model: str
    text: str
    keys: Sequence[Tensor]
    layers: Sequence[int]
    head: int | None = None
    values: Sequence[Tensor] = ()
    before: Sequence[Tensor] = ()

    def of(self, layer: int) -> Tensor:
        """Return the keys of a layer for the chosen heads, [H, T, D]."""
        return self._heads(self.keys[layer])

    def before_of(self, layer: int) -> Tensor:
        """Return the keys of a layer before RoPE for the chosen heads, [H, T, D]."""
        return self._heads(self.before[layer])

    def values_of(self, layer: int) -> Tensor:
        """Return the values of a layer for the chosen heads, [H, T, Dv]."""
        return self._heads(self.values[layer])

    def _heads(self, x: Tensor) -> Tensor:
        return x if self.head is None else x[self.head : self.head + 1]

    def caption(self) -> str:
        """Return model, length and source for a title."""
        heads = "all KV heads" if self.head is None else f"KV head {self.head}"
        return f"{model_name(self.model)}, {self.keys[0].shape[1]:,} tokens of {Path(self.text).name}, {heads}"


@dataclass(frozen=True)
class Plot:
    """A kind of plot. Each file of `kinds/` defines one as `PLOT`, named after the file.

    reads: type of the data passed to `draw`.

    - "keys": a `ModelKeys`. "activations": the same with keys before RoPE.
    - "evaluation": records of `tersekv eval`.
    - "bytes": a list of `Held`, from such records or predicted.
    - "timings": a list of `Timing`, from a benchmark of attention.
    - "decodings": a list of `Rate`, from a benchmark of decoding.
    - "streams": a list of `StreamStep`, from a benchmark of growing caches.

    draw: called with the data and the options named in `options`. needs: packages of the extra
    `lab` in addition to matplotlib.
    """

    title: str
    reads: Reads
    draw: Callable[..., Picture]
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
