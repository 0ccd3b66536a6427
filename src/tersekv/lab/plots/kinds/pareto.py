"""Quality by true bits: one point per recipe, and the Pareto front.

Bits are all bytes held at that length, including scales, norms, indices, codebooks and exact
tokens, over the elements of a full cache. Error bars are standard errors over samples. The dashed
line is the full cache.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tersekv.errors import UserError
from tersekv.lab.evals.records import Record
from tersekv.lab.plots.base import KeyFigures, Picture, Plot, model_name
from tersekv.lab.plots.groups import Group, axis_label, grouped, lower_is_better
from tersekv.lab.plots.labels import Mark, place, short
from tersekv.lab.plots.style import BLACK, CATEGORIES, GREY, MARKERS, heading, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE_LETTERS = {1: 90, 2: 80}
"""Maximum number of letters in a panel's title line, by the number of panel columns."""

LOG_FROM = 2.5
"""Ratio of the largest to the smallest error above which the axis is logarithmic."""


class Point(NamedTuple):
    """A recipe with its true bits per element, and the metric's mean and standard error (NaN for a
    single sample). name: of the recipe, with its number of samples if the full cache has more."""

    recipe: str
    bits: float
    mean: float
    stderr: float
    name: str

    @property
    def span(self) -> tuple[float, float]:
        """Ends of the error bar."""
        reach = self.stderr if math.isfinite(self.stderr) else 0.0
        return self.mean - reach, self.mean + reach


def points_of(group: Group, metric: str) -> list[Point]:
    """Return the packed recipes with a finite mean, by bits."""
    found = []
    for summary in group.packed:
        estimate = summary.metrics.get(metric)
        if estimate is not None and math.isfinite(estimate.mean):
            n = "" if summary.samples == group.full.samples else f" (n = {summary.samples})"
            found.append(Point(summary.recipe, summary.bits_per_element, *estimate, short(summary.recipe) + n))
    return sorted(found, key=lambda point: (point.bits, point.recipe))


def front(points: Sequence[Point], lower: bool) -> list[Point]:
    """Return the points whose mean is better than that of every point with at most their bits."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p.bits, p.mean if lower else -p.mean)):
        if not best or (point.mean < best[-1].mean if lower else point.mean > best[-1].mean):
            best.append(point)
    return best


def draw(records: Sequence[Record], metric: str | None = None, task: str | None = None) -> Picture:
    """Draw one panel per group of records that has the metric."""
    groups = grouped(records, task)
    chosen = [(group, name) for group in groups if (name := group.metric(metric)) and points_of(group, name)]
    if not chosen:
        raise _nothing(groups, metric)
    columns = 1 if len(chosen) == 1 else 2
    height = math.ceil(len(chosen) / columns)
    figure = new_figure(7.6 if columns == 1 else 12.4, 4.9 * height + 0.6)
    panels = figure.subplots(height, columns, squeeze=False).ravel()
    for axes in panels[len(chosen) :]:
        axes.set_visible(False)
    heading(
        figure, "Quality against true size", ", ".join(dict.fromkeys(model_name(group.model) for group, _ in chosen))
    )
    styles = _styles([summary.recipe for group, _ in chosen for summary in group.packed])
    for axes, (group, name) in zip(panels, chosen, strict=False):
        _panel(axes, group, name, styles, columns)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes, (group, name) in zip(panels, chosen, strict=False):
        points = points_of(group, name)
        place(figure, axes, [Mark(p.bits, p.mean, p.name) for p in points], _lines(axes, group, name))
    return Picture(figure, _alt(chosen), [_table(group, name) for group, name in chosen])


def _panel(axes: Axes, group: Group, metric: str, styles: dict[str, tuple[str, str]], columns: int) -> None:
    """Draw points, error bars, the front and the full cache. Names are placed later."""
    points = points_of(group, metric)
    best = front(points, lower_is_better(metric))
    axes.step([p.bits for p in best], [p.mean for p in best], where="post", color=GREY, linewidth=1.2, zorder=1)
    for point in points:
        colour, marker = styles[_method(point.recipe)]
        axes.errorbar(
            point.bits, point.mean, yerr=point.span[1] - point.mean or None, color=colour, marker=marker,
            markersize=6.5, markerfacecolor=colour if point in best else "white", elinewidth=1, capsize=2.5, zorder=3,
        )  # fmt: skip
    _scales(axes, points, group.full.metrics[metric].mean, metric)
    axes.set_title(textwrap.fill(f"{group.title}, n = {group.full.samples}", TITLE_LETTERS[columns]))
    axes.set_xlabel(f"true bits per element at {group.full.tokens:,} tokens, everything counted")
    axes.set_ylabel(axis_label(metric))
    axes.grid(True)


def _lines(axes: Axes, group: Group, metric: str) -> list[tuple[float, float, float, float]]:
    """Return the lines that names should not cover: the front, the error bars and the full cache's
    line."""
    points = points_of(group, metric)
    lines = [(p.bits, low, p.bits, high) for p in points for low, high in [p.span]]
    for a, b in itertools.pairwise(front(points, lower_is_better(metric))):
        lines += [(a.bits, a.mean, b.bits, a.mean), (b.bits, a.mean, b.bits, b.mean)]
    full = group.full.metrics[metric].mean
    low, high = axes.get_ylim()
    return [*lines, (*axes.get_xlim()[:1], full, axes.get_xlim()[1], full)] if low <= full <= high else lines


def _scales(axes: Axes, points: Sequence[Point], full: float, metric: str) -> None:
    """Set axis limits with room for names and choose a logarithmic axis for widely different
    errors.

    Also draws the full cache's line.
    """
    means = [p.mean for p in points]
    wide = lower_is_better(metric) and min(means) > 0 and max(means) / min(means) > LOG_FROM
    shown = means if wide else [end for p in points for end in p.span]
    if math.isfinite(full) and (full > 0 or not wide):
        shown.append(full)
    low, high = min(shown), max(shown)
    if wide:
        room = (high / low) ** 0.15
        axes.set_yscale("log")
        axes.set_ylim(low / room, high * room)
        ticks = (1, 2, 5) if high / low < 1e4 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=ticks) if high / low > 10 else MaxNLocator(7))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    else:
        room = 0.12 * max(high - low, 0.02 * abs(high), 1e-9)
        axes.set_ylim(low - room, high + room)
    bits = [p.bits for p in points]
    margin = max(0.3, 0.15 * (max(bits) - min(bits)))
    axes.set_xlim(min(bits) - margin, max(bits) + margin)
    if full in shown:
        axes.axhline(full, color=BLACK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        above = lower_is_better(metric)
        axes.annotate(
            f"full cache: {full:.4g}", (0, full), xycoords=("axes fraction", "data"), xytext=(3, 3 if above else -3),
            textcoords="offset points", va="bottom" if above else "top", fontsize=8,
        )  # fmt: skip


def _styles(recipes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return colour and marker of each method, the same in every panel."""
    methods = sorted(set(map(_method, recipes)))
    colours, markers = len(CATEGORIES), len(MARKERS)
    return {name: (CATEGORIES[i % colours], MARKERS[(i + i // colours) % markers]) for i, name in enumerate(methods)}


def _method(recipe: str) -> str:
    """Return the name of the first method in a recipe, after its window."""
    return recipe.split(";")[0].split("+")[-1].split("/")[0].split(":")[0]


def _nothing(groups: Sequence[Group], metric: str | None) -> UserError:
    held = sorted({name for group in groups for name in group.full.metrics})
    if metric is None or metric in held:
        return UserError(
            "the records have no packed recipe with a finite score: run `tersekv eval` with one or more --recipe"
        )
    return UserError(f"the records have no metric {metric!r}; they have {', '.join(held)}")


def _table(group: Group, metric: str) -> KeyFigures:
    points = points_of(group, metric)
    best = front(points, lower_is_better(metric))
    rows = [
        [p.recipe, "yes" if p in best else "", f"{p.bits:.2f}", f"{p.mean:.4g}", _written(p.stderr)] for p in points
    ]
    full = group.full
    rows.append(
        [
            full.recipe,
            "",
            f"{full.bits_per_element:.2f}",
            f"{full.metrics[metric].mean:.4g}",
            _written(full.metrics[metric].stderr),
        ]
    )
    columns = ("recipe", "on the front", "true bits", metric, "standard error")
    return KeyFigures(f"{group.title} ({group.model})", columns, rows, left=2)


def _written(stderr: float) -> str:
    return f"{stderr:.2g}" if math.isfinite(stderr) else "-"


def _alt(chosen: Sequence[tuple[Group, str]]) -> str:
    said = []
    for group, metric in chosen:
        best = front(points_of(group, metric), lower_is_better(metric))
        listed = "; ".join(f"{p.recipe} at {p.bits:.2f} bits: {p.mean:.4g}" for p in best)
        said.append(f"{group.title}, {metric}, front: {listed}.")
    return f"Scatter plot of quality against true bits per element. {' '.join(said)}"


PLOT = Plot("quality against true bits, with the front of the best recipes", "evaluation", draw, ("metric", "task"))
