"""Place names next to points so that they do not cover each other, points, lines or the frame."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.transforms import Bbox

from tersekv.lab.evals.names import broken
from tersekv.lab.plots.style import BLACK, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DISTANCES = (7, 10, 14, 20, 28, 38, 50, 66, 86, 110)
"""Distances between a label and its point to try, in typographic points, nearest first."""
DIRECTIONS = 24
LINE = 24
"""Maximum number of characters in a label's line, if its parts allow it."""
LEADER_FROM = 11
"""Distance from its point, in typographic points, above which a label is joined to it by a thin
line."""

Line = tuple[float, float, float, float]


class Mark(NamedTuple):
    """A named point in data coordinates."""

    x: float
    y: float
    name: str


def short(recipe: str) -> str:
    """Break a recipe into short lines, only where its parts or options begin."""
    return "\n".join(broken(recipe, LINE))


def place(figure: Figure, axes: Axes, marks: Sequence[Mark], lines: Sequence[Line]) -> None:
    """Write each mark's name near it, with a thin line to distant names.

    lines: other segments that names must not cover, x0, y0, x1, y1 in data coordinates. The
    figure's layout is computed first and must not change afterwards.
    """
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    points = [tuple(to_pixels((mark.x, mark.y))) for mark in marks]
    segments: list[Line] = [(*to_pixels((a, b)), *to_pixels((c, d))) for a, b, c, d in lines]
    taken = [_around(x, y, 4.5 * scale) for x, y in points]
    taken += [text.get_window_extent() for text in axes.texts]
    for mark, (x, y) in sorted(zip(marks, points, strict=True), key=lambda pair: (-pair[1][1], pair[1][0])):
        text = axes.text(
            mark.x, mark.y, mark.name, color=BLACK, fontsize=7.5, ha="center", va="center", linespacing=1.05,
            zorder=4, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8},
        )  # fmt: skip
        text.set_in_layout(False)
        size = text.get_window_extent()
        box = _best(x, y, size.width, size.height, axes.get_window_extent(), taken, segments, scale)
        taken.append(box)
        text.set_position(tuple(to_data(((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2))))
        end = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
        if math.dist(end, (x, y)) > LEADER_FROM * scale:
            segments.append((x, y, *end))
            (x0, y0), (x1, y1) = to_data([(x, y), end])
            axes.plot([x0, x1], [y0, y1], color=GREY, linewidth=0.5, zorder=2, scalex=False, scaley=False)


def _best(
    x: float, y: float, width: float, height: float, frame: Bbox, taken: Sequence[Bbox], lines: Sequence[Line],
    scale: float,
) -> Bbox:  # fmt: skip
    """Return the nearest box that covers nothing, or the one that covers the least."""
    best, least = _around(x, y, width), math.inf
    area = width * height
    for distance, step in itertools.product(DISTANCES, range(DIRECTIONS)):
        angle = 2 * math.pi * step / DIRECTIONS
        reach = distance * scale
        cx = x + math.cos(angle) * (reach + width / 2)
        cy = y + math.sin(angle) * (reach + height / 2)
        box = Bbox.from_bounds(cx - width / 2, cy - height / 2, width, height)
        cost = 2 * sum(_overlap(box, other) for other in taken) + 4 * (area - _overlap(box, frame))
        cost += 0.4 * area * sum(_crosses(box, line) for line in lines) + area * distance / 200
        if cost < least - 1e-6:
            best, least = box, cost
    return best


def _around(x: float, y: float, reach: float) -> Bbox:
    return Bbox.from_extents(x - reach, y - reach, x + reach, y + reach)


def _overlap(a: Bbox, b: Bbox) -> float:
    width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
    return width * height if width > 0 and height > 0 else 0.0


def _crosses(box: Bbox, line: Line) -> bool:
    """True if a segment passes through a box (Liang and Barsky's clipping)."""
    x0, y0, x1, y1 = line
    first, last = 0.0, 1.0
    for start, step, low, high in ((x0, x1 - x0, box.x0, box.x1), (y0, y1 - y0, box.y0, box.y1)):
        if step == 0:
            if not low <= start <= high:
                return False
            continue
        a, b = sorted(((low - start) / step, (high - start) / step))
        first, last = max(first, a), min(last, b)
    return first < last
