"""Decoding speed against the tokens in the cache, a line per cache (records of `tersekv bench generate`).

Points are medians over rounds, bars go from the slowest to the fastest. The table compares each cache with the full one
at the same depth.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.ticker import NullLocator

from tersekv.errors import UserError
from tersekv.lab.evals.names import short_names
from tersekv.lab.evals.reader import FULL
from tersekv.lab.plots.base import KeyFigures, Picture, Plot, model_name
from tersekv.lab.plots.decodings import Rate
from tersekv.lab.plots.style import BLACK, CATEGORIES, MARKERS, heading, new_figure


def draw(rates: Sequence[Rate]) -> Picture:
    """One panel, of the records' only model."""
    models = list(dict.fromkeys(rate.model for rate in rates))
    if len(models) > 1:
        raise UserError(f"the records are of several models ({', '.join(models)}): give those of one")
    figure = new_figure(8.2, 4.9)
    axes = figure.subplots()
    names = short_names([rate.cache for rate in rates])
    depths = sorted({rate.depth for rate in rates})
    for i, (cache, name) in enumerate(names.items()):
        own = sorted((rate for rate in rates if rate.cache == cache), key=lambda rate: rate.depth)
        middle = [rate.middle for rate in own]
        reach = [[r.middle - r.low for r in own], [r.high - r.middle for r in own]]
        colours = CATEGORIES[: CATEGORIES.index(BLACK)]
        axes.errorbar(
            [depths.index(rate.depth) for rate in own], middle, yerr=reach,
            label="full cache" if cache == FULL else name,
            color=BLACK if cache == FULL else colours[i % len(colours)], linestyle="--" if cache == FULL else "-",
            marker=MARKERS[i % len(MARKERS)], linewidth=1.2, markersize=5, elinewidth=0.8, capsize=2,
        )  # fmt: skip
    axes.set_xticks(range(len(depths)), [f"{depth:,}" for depth in depths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("decoding speed (tokens/s), higher is better")
    axes.grid(True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    heading(
        figure, "Decoding speed with each cache", f"{model_name(models[0])}; bars from the slowest round to the fastest"
    )
    return Picture(figure, _alt(rates), [_table(rates)])


def _full(rates: Sequence[Rate], depth: int) -> float | None:
    return next((rate.middle for rate in rates if (rate.cache, rate.depth) == (FULL, depth)), None)


def _table(rates: Sequence[Rate]) -> KeyFigures:
    rows = []
    for rate in sorted(rates, key=lambda rate: rate.depth):
        full = _full(rates, rate.depth)
        times = "-" if full is None else f"{rate.middle / full:.2f}"
        rows.append([rate.cache, f"{rate.depth:,}", f"{rate.middle:.2f}", f"{rate.low:.2f}–{rate.high:.2f}", times])
    columns = ("cache", "depth", "tokens/s", "slowest–fastest", "times the full cache")
    return KeyFigures(f"decoding speed ({rates[0].model})", columns, rows)


def _alt(rates: Sequence[Rate]) -> str:
    deepest = max(rate.depth for rate in rates)
    said = "; ".join(f"{rate.cache}: {rate.middle:.1f}" for rate in rates if rate.depth == deepest)
    return f"Line chart of decoding speed against tokens in the cache. Tokens/s at {deepest:,} tokens: {said}."


PLOT = Plot("decoding speed against tokens in the cache, a line per cache", "decodings", draw)
