"""Bytes that a cache holds by part: one stacked bar per recipe, from records or predicted from
shapes.

Records are those of the longest samples of one group. Predictions are those of `tersekv estimate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tersekv.cache.footprint import PARTS
from tersekv.errors import UserError
from tersekv.lab.plots.base import KeyFigures, Picture, Plot
from tersekv.lab.plots.held import Held
from tersekv.lab.plots.style import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, YELLOW, heading, new_figure

COLOURS = dict(zip(PARTS, (BLUE, SKY, PINK, GREEN, ORANGE, GREY), strict=False))
OTHERS = (RED, YELLOW)


def draw(source: Sequence[Held]) -> Picture:
    """Draw bars by size, the smallest on top. The full cache has no parts and is only in the title."""
    packed = sorted((held for held in source if not held.full), key=lambda held: (held.bytes, held.recipe))
    if not packed:
        raise UserError("there is no packed recipe to plot: give records with one, or --recipe")
    unit, factor = _unit(max(held.bytes for held in packed))
    figure = new_figure(9.0, 0.46 * len(packed) + 2.0)
    axes = figure.subplots()
    left = [0.0] * len(packed)
    colours = _colours(packed)
    for part, colour in colours.items():
        sizes = [held.parts.get(part, 0) / factor for held in packed]
        axes.barh(
            range(len(packed)),
            sizes,
            left=left,
            color=colour,
            label=part,
            height=0.68,
            edgecolor="white",
            linewidth=0.4,
        )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for row, (held, end) in enumerate(zip(packed, left, strict=True)):
        said = f"{end:.3g} {unit}, {held.bits:.2f} bits"
        axes.annotate(said, (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(range(len(packed)), [held.recipe for held in packed])
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.22)
    axes.set_xlabel(f"bytes held ({unit})")
    axes.tick_params(axis="y", length=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=min(6, len(colours)))
    heading(figure, f"Bytes of a cache of {packed[0].tokens:,} tokens, by part", _detail(source, unit, factor))
    return Picture(figure, _alt(packed), [_table(source)])


def _colours(packed: Sequence[Held]) -> dict[str, str]:
    """Return the colour of each part that any recipe holds, in the order of `PARTS`."""
    present = [part for held in packed for part, size in held.parts.items() if size]
    known = {part: colour for part, colour in COLOURS.items() if part in present}
    others = [part for part in dict.fromkeys(present) if part not in COLOURS]
    return known | {part: OTHERS[i % len(OTHERS)] for i, part in enumerate(others)}


def _detail(source: Sequence[Held], unit: str, factor: float) -> str:
    full = [held for held in source if held.full]
    said = f"; the full cache holds {full[0].bytes / factor:,.3g} {unit} ({full[0].bits:g} bits)" if full else ""
    return f"{source[0].origin}{said}"


def _unit(size: int) -> tuple[str, float]:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return unit, factor
    return "B", 1.0


def _table(source: Sequence[Held]) -> KeyFigures:
    parts = list(dict.fromkeys(part for held in source for part, size in held.parts.items() if size))
    rows = [
        [held.recipe, f"{held.bits:.2f}", f"{held.bytes:,}", *(f"{held.parts.get(part, 0):,}" for part in parts)]
        for held in source
    ]
    title = f"bytes held at {source[0].tokens:,} tokens ({source[0].origin})"
    return KeyFigures(title, ("recipe", "true bits", "bytes", *parts), rows)


def _alt(packed: Sequence[Held]) -> str:
    listed = "; ".join(f"{held.recipe}: {held.bytes:,} bytes, {held.bits:.2f} bits per element" for held in packed)
    return f"Stacked bars of the bytes that each recipe holds at {packed[0].tokens:,} tokens, by part. {listed}."


PLOT = Plot("bytes held by part, one bar per recipe", "bytes", draw)
