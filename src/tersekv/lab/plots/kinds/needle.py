"""Retrieval by depth and length: one heat map per recipe, as Kamradt's needle in a haystack is
shown.

It reads records of any task whose `details` give the length and depth of the needle. A cell is the
mean over its samples, or grey without samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tersekv.errors import UserError
from tersekv.lab.evals.records import Record
from tersekv.lab.plots.base import KeyFigures, Picture, Plot, model_name, short_count
from tersekv.lab.plots.groups import Group, grouped
from tersekv.lab.plots.labels import short
from tersekv.lab.plots.style import colour_map, heading, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

PREFERRED = "needle"
MOST_DEPTHS = 11
"""Largest number of different depths drawn as they are. More are merged in steps of 10 %."""
MOST_NUMBERS = 80
"""Largest number of cells of a map that shows their values."""


class Map(NamedTuple):
    """Means [depths, lengths], NaN for cells without samples, and the mean over all samples."""

    recipe: str
    bits: float
    cells: NDArray[np.float64]
    mean: float


def grid_of(group: Group) -> tuple[list[int], list[int]]:
    """Return the lengths (tokens) and depths (percent) of a group, ascending."""
    cells = [_cell(r) for found in group.records.values() for r in found]
    depths = sorted({depth for _, depth in cells})
    return sorted({length for length, _ in cells}), _binned(depths)


def maps_of(group: Group, metric: str) -> list[Map]:
    """Return one map per recipe, the full cache first and the others by bits."""
    lengths, depths = grid_of(group)
    made = []
    for summary in (group.full, *sorted(group.packed, key=lambda s: (s.bits_per_element, s.recipe))):
        cells: dict[tuple[int, int], list[float]] = defaultdict(list)
        for record in group.records[summary.recipe]:
            score = record["metrics"].get(metric)
            if score is not None:
                length, depth = _cell(record)
                nearest = min(depths, key=lambda d, depth=depth: abs(d - depth))  # type: ignore[misc]
                cells[length, nearest].append(score)
        values = [[np.mean(cells[n, d]) if cells[n, d] else math.nan for n in lengths] for d in depths]
        scores = [score for found in cells.values() for score in found]
        mean = float(np.mean(scores)) if scores else math.nan
        made.append(Map(summary.recipe, summary.bits_per_element, np.array(values, dtype=float), mean))
    return made


def has_cells(group: Group) -> bool:
    """True if every record gives the length and depth of its needle."""
    return all(
        isinstance(record["details"].get(name), int | float)
        for found in group.records.values()
        for record in found
        for name in ("length", "depth")
    )


def draw(records: Sequence[Record], metric: str | None = None, task: str | None = None) -> Picture:
    """Draw one panel per recipe for one task with depths. `needle` is preferred if there are
    several."""
    group = _chosen(grouped(records, task), task)
    metric = metric or "accuracy"
    if metric not in group.full.metrics:
        raise UserError(f"task {group.name} has no metric {metric!r}; it has {', '.join(group.full.metrics)}")
    lengths, depths = grid_of(group)
    maps = maps_of(group, metric)
    columns = min(range(1, 6), key=lambda n: (-(-len(maps) // n) * n - len(maps) + abs(n - 4), -n))
    columns = min(columns, len(maps))
    rows = math.ceil(len(maps) / columns)
    width = max(2.2, 0.5 * len(lengths) + 0.9)
    figure = new_figure(max(width * columns + 1.4, 5.5), max(2.2, 0.28 * len(depths) + 1.1) * rows + 0.9)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axes in panels.ravel()[len(maps) :]:
        axes.set_visible(False)
    for axes, made in zip(panels.ravel(), maps, strict=False):
        image = _panel(axes, made, lengths, depths)
    for axes in panels[:, 0]:
        axes.set_ylabel("depth (%)")
    for i, axes in enumerate(panels.ravel()[: len(maps)]):
        if i + columns >= len(maps):
            axes.set_xlabel("length (tokens)")
            axes.tick_params(labelbottom=True)
    figure.colorbar(image, ax=panels, label=metric, shrink=0.8, pad=0.02)
    heading(
        figure,
        f"{metric.capitalize()} by depth and length",
        f"{model_name(group.model)}, {group.title}; true bits are means over these lengths",
    )
    return Picture(figure, _alt(group, metric, maps), [_table(group, metric, maps)])


def _panel(axes: Axes, made: Map, lengths: Sequence[int], depths: Sequence[int]) -> AxesImage:
    image = axes.imshow(made.cells, aspect="auto", cmap=colour_map(), vmin=0, vmax=1)
    axes.set_title(f"{short(made.recipe)}\n{made.bits:.2f} bits, mean {made.mean:.2f}", fontsize=8.5)
    axes.set_xticks(range(len(lengths)), [short_count(n) for n in lengths], rotation=45 if len(lengths) > 5 else 0)
    axes.set_yticks(range(len(depths)), [str(d) for d in depths])
    axes.tick_params(length=0)
    if made.cells.size <= MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(made.cells):
            if math.isfinite(value):
                colour = "black" if value > 0.6 else "white"
                written = f"{value:.2f}".removeprefix("0") if value < 1 else "1"
                axes.text(
                    column, row, "0" if value == 0 else written, color=colour, ha="center", va="center", fontsize=7
                )
    return image


def _chosen(groups: Sequence[Group], task: str | None) -> Group:
    able = [group for group in groups if has_cells(group)]
    if not able:
        held = ", ".join(dict.fromkeys(group.name for group in groups))
        raise UserError(
            f"no record has the length and depth of a needle (they are of {held}): "
            "run `tersekv eval needle … --out FOLDER`"
        )
    preferred = [group for group in able if group.name == (task or PREFERRED)] or able
    return max(preferred, key=lambda group: sum(map(len, group.records.values())))


def _cell(record: Record) -> tuple[int, int]:
    return int(record["details"]["length"]), round(record["details"]["depth"])


def _binned(depths: list[int]) -> list[int]:
    return depths if len(depths) <= MOST_DEPTHS else list(range(0, 101, 10))


def _mean(cells: NDArray[np.float64]) -> str:
    known = cells[np.isfinite(cells)]
    return f"{known.mean():.2f}" if known.size else "-"


def _table(group: Group, metric: str, maps: Sequence[Map]) -> KeyFigures:
    lengths, _ = grid_of(group)
    rows = [
        [made.recipe, f"{made.bits:.2f}", *(_mean(column) for column in made.cells.T), f"{made.mean:.2f}"]
        for made in maps
    ]
    columns = ("recipe", "true bits", *(f"{n:,} tokens" for n in lengths), "all")
    return KeyFigures(f"{metric} of {group.title} ({group.model})", columns, rows)


def _alt(group: Group, metric: str, maps: Sequence[Map]) -> str:
    means = "; ".join(f"{made.recipe} ({made.bits:.2f} bits): {made.mean:.2f}" for made in maps)
    return f"Heat maps of {metric} of {group.title} by depth and length, one per recipe. Means: {means}."


PLOT = Plot("retrieval by depth and length, one map per recipe", "evaluation", draw, ("metric", "task"))
