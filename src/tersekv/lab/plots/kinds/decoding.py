"""Decoding speed by tokens in the cache, one line per cache (records of `tersekv bench generate`).

Columns of panels are dtypes, and rows are ways to read the prompt. Points are medians over rounds,
and bars range from the slowest to the fastest. The table compares each cache with the full one
after the same context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import NullLocator

from tersekv.errors import UserError
from tersekv.lab.evals.names import short_names
from tersekv.lab.evals.reader import FULL
from tersekv.lab.plots.base import KeyFigures, Picture, Plot, model_name
from tersekv.lab.plots.decodings import Rate, Setting
from tersekv.lab.plots.style import BLACK, CATEGORIES, MARKERS, heading, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(rates: Sequence[Rate]) -> Picture:
    """Draw all panels with the same scale. The records must be of one model."""
    models = list(dict.fromkeys(rate.model for rate in rates))
    if len(models) > 1:
        raise UserError(f"the records are of several models ({', '.join(models)}): give records of one model")
    dtypes = list(dict.fromkeys(rate.setting.dtype for rate in rates))
    ways = list(dict.fromkeys(rate.setting[1:] for rate in rates))
    names = short_names([rate.cache for rate in rates])
    contexts = sorted({rate.context for rate in rates})
    figure = new_figure(4.2 + 4.0 * len(dtypes), 1.7 + 3.2 * len(ways))
    panels = figure.subplots(len(ways), len(dtypes), sharex=True, sharey=True, squeeze=False)
    for row, way in zip(panels, ways, strict=True):
        for axes, dtype in zip(row, dtypes, strict=True):
            setting = Setting(dtype, *way)
            _panel(axes, [rate for rate in rates if rate.setting == setting], names, contexts)
            axes.set_title(str(setting))
        row[0].set_ylabel("decoding speed (tokens/s),\nhigher is better")
    panels[0, 0].set_ylim(0, 1.05 * max(rate.high for rate in rates))  # limit for all panels, which share the axis
    for axes in panels[-1]:
        axes.set_xlabel("tokens in the cache")
    lines = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(lines.values()), list(lines), loc="outside right upper")
    heading(
        figure, "Decoding speed with each cache", f"{model_name(models[0])}; bars from the slowest round to the fastest"
    )
    return Picture(figure, _alt(rates), _tables(rates))


def _panel(axes: Axes, rates: Sequence[Rate], names: dict[str, str], contexts: Sequence[int]) -> None:
    colours = CATEGORIES[: CATEGORIES.index(BLACK)]
    for i, (cache, name) in enumerate(names.items()):
        own = sorted((rate for rate in rates if rate.cache == cache), key=lambda rate: rate.context)
        if not own:
            continue
        reach = [[rate.middle - rate.low for rate in own], [rate.high - rate.middle for rate in own]]
        axes.errorbar(
            [contexts.index(rate.context) for rate in own], [rate.middle for rate in own], yerr=reach,
            label="full cache" if cache == FULL else name,
            color=BLACK if cache == FULL else colours[i % len(colours)], linestyle="--" if cache == FULL else "-",
            marker=MARKERS[i % len(MARKERS)], linewidth=1.2, markersize=5, elinewidth=0.8, capsize=2,
        )  # fmt: skip
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True)


def _tables(rates: Sequence[Rate]) -> list[KeyFigures]:
    """Return one table per setting."""
    columns = ("cache", "context", "tokens/s", "slowest–fastest", "times the full cache", "adds ms")
    tables = []
    for setting in dict.fromkeys(rate.setting for rate in rates):
        own = sorted((rate for rate in rates if rate.setting == setting), key=lambda rate: rate.context)
        full = {rate.context: rate.middle for rate in own if rate.cache == FULL}
        rows = []
        for rate in own:
            times = f"{rate.middle / full[rate.context]:.2f}" if rate.context in full else "-"
            adds = "-" if rate.adds_ms is None else f"{rate.adds_ms:.1f}"
            spread = f"{rate.low:.2f}–{rate.high:.2f}"
            rows.append([rate.cache, f"{rate.context:,}", f"{rate.middle:.2f}", spread, times, adds])
        tables.append(KeyFigures(f"decoding speed ({rates[0].model}, {setting})", columns, rows))
    return tables


def _alt(rates: Sequence[Rate]) -> str:
    longest = max(rate.context for rate in rates)
    parts = []
    for setting in dict.fromkeys(rate.setting for rate in rates):
        own = [rate for rate in rates if (rate.setting, rate.context) == (setting, longest)]
        if own:
            parts.append(f"{setting}: " + "; ".join(f"{rate.cache}: {rate.middle:.1f}" for rate in own))
    said = ". ".join(parts)
    return f"Line charts of decoding speed against tokens in the cache. Tokens/s after {longest:,} tokens: {said}."


PLOT = Plot("decoding speed against tokens in the cache, a line per cache", "decodings", draw)
