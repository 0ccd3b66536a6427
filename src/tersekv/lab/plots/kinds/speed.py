"""Time of one token's attention by number of tokens, packed and dense (records of `tersekv bench
attend`).

Both axes are logarithmic. Bars are the 10th and 90th percentile of the runs. The table compares
each packed format with the fastest dense implementation of the same shape, tokens and threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from tersekv.errors import UserError
from tersekv.lab.plots.base import KeyFigures, Picture, Plot
from tersekv.lab.plots.style import BLUE, GREEN, GREY, MARKERS, ORANGE, PINK, RED, SKY, heading, new_figure
from tersekv.lab.plots.timings import Timing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PACKED_COLOURS = (BLUE, SKY, GREEN, PINK)
DENSE_COLOURS = (ORANGE, RED, GREY, "#8c6d1f")


def speedups(timings: Sequence[Timing]) -> list[tuple[Timing, Timing, float]]:
    """Return each packed timing with the fastest dense one and the speed-up over it."""
    made = []
    for timing in timings:
        dense = [
            other
            for other in timings
            if not other.packed
            and (other.shape, other.tokens, other.threads) == (timing.shape, timing.tokens, timing.threads)
        ]
        if timing.packed and dense:
            best = min(dense, key=lambda other: other.median_us)
            made.append((timing, best, best.median_us / timing.median_us))
    return made


def draw(timings: Sequence[Timing]) -> Picture:
    """Draw one row per number of threads and one column per shape."""
    if not any(timing.packed for timing in timings):
        raise UserError("the records have no packed format: give records of `tersekv bench attend`")
    shapes = list(dict.fromkeys(timing.shape for timing in timings))
    threads = sorted({timing.threads for timing in timings})
    figure = new_figure(4.6 * len(shapes) + 0.6, 3.3 * len(threads) + 1.5)
    panels = figure.subplots(len(threads), len(shapes), squeeze=False, sharex=True, sharey="col")
    styles = _styles(timings)
    for row, count in zip(panels, threads, strict=True):
        for axes, shape in zip(row, shapes, strict=True):
            here = [t for t in timings if (t.shape, t.threads) == (shape, count)]
            _panel(axes, here, styles)
            axes.set_title(f"{shape}, {count} thread{'s' if count > 1 else ''}")
        row[0].set_ylabel("time of one token's attention (µs)")
    for axes in panels[-1]:
        axes.set_xlabel("tokens in the cache")
    lines = {
        name: line for axes in panels.ravel() for line, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    names = [name for name in styles if name in lines]
    figure.legend([lines[name] for name in names], names, loc="outside lower center", ncols=min(4, len(names)))
    heading(figure, "Decode attention, packed and dense", "shapes are query heads / KV heads / head dim")
    return Picture(figure, _alt(timings), [_table(timings)])


def _styles(timings: Sequence[Timing]) -> dict[str, dict[str, Any]]:
    """Return colour, marker and dash of each name: packed ones by bits, then dense ones."""
    packed = list(dict.fromkeys(t.name for t in sorted(timings, key=lambda t: (t.what, t.bits or 0)) if t.packed))
    dense = list(dict.fromkeys(t.name for t in timings if not t.packed))
    styles: dict[str, dict[str, Any]] = {}
    for names, colours, dash in ((packed, PACKED_COLOURS, "-"), (dense, DENSE_COLOURS, "--")):
        for i, name in enumerate(names):
            at = len(styles)
            marker = MARKERS[(at + at // len(colours)) % len(MARKERS)]  # so that a colour does not soon repeat a marker
            styles[name] = {"color": colours[i % len(colours)], "marker": marker, "linestyle": dash}
    return styles


def _panel(axes: Axes, timings: Sequence[Timing], styles: dict[str, dict[str, Any]]) -> None:
    for name, style in styles.items():
        found = sorted((t for t in timings if t.name == name), key=lambda t: t.tokens)
        if not found:
            continue
        times = np.array([t.median_us for t in found])
        spread = np.maximum([[t.median_us - t.p10_us for t in found], [t.p90_us - t.median_us for t in found]], 0.0)
        axes.errorbar(
            [t.tokens for t in found], times, yerr=spread, label=name, linewidth=1.2, markersize=4.5, elinewidth=0.8,
            capsize=2, **style,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted({t.tokens for t in timings})
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelbottom=True)
    axes.grid(True)


def _table(timings: Sequence[Timing]) -> KeyFigures:
    rows = [
        [
            t.name,
            t.shape,
            f"{t.tokens:,}",
            str(t.threads),
            f"{t.median_us:,.0f}",
            f"{d.median_us:,.0f}",
            d.name,
            f"{r:.2f}",
        ]
        for t, d, r in speedups(timings)
    ]
    columns = ("packed", "shape", "tokens", "threads", "median µs", "fastest dense µs", "which", "times faster")
    return KeyFigures("decode attention against the fastest dense way", columns, rows, left=2)


def _alt(timings: Sequence[Timing]) -> str:
    longest = max(t.tokens for t in timings)
    ratios = [ratio for t, _, ratio in speedups(timings) if t.tokens == longest]
    said = (
        f" At {longest:,} tokens packed attention is {min(ratios):.1f} to {max(ratios):.1f} times as fast."
        if ratios
        else ""
    )
    return f"Line charts of the time of one token's attention against tokens, packed formats and dense ways.{said}"


PLOT = Plot("time of attention against tokens, packed and dense", "timings", draw)
