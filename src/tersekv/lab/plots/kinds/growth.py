"""Size and step time of a cache by stream length (records of `benchmarks/streams.py growth`).

Source: SubGen, arXiv 2402.06082, Theorem 1.

Both axes are logarithmic. Growth proportional to the context has slope 1; this line is drawn
through the last point of the cache that keeps every token. The table gives the growth of size and
step time from a middle length to the last one. At the middle length a sketch has all its clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from tersekv.errors import UserError
from tersekv.lab.plots.base import KeyFigures, Picture, Plot, short_count
from tersekv.lab.plots.streams import StreamStep
from tersekv.lab.plots.style import CATEGORIES, GREY, MARKERS, heading, new_figure
from tersekv.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FROM_TOKENS = 16384
"""Smallest stream length that the table may start from."""
PANELS = (("bytes held (kB)", "bytes", 1e3), ("time of one step (µs)", "step_us", 1.0))


def name(recipe: str) -> str:
    """Return a recipe's name for a legend: the policy without its options, and the codec."""
    policy, plus, coder = recipe.rpartition("+")
    return f"{policy.partition(':')[0]} + {coder}" if plus else f"every token, {coder}"


def growth(steps: Sequence[StreamStep]) -> list[tuple[StreamStep, StreamStep]]:
    """Return two steps of each recipe: the one from which growth is measured, and the last one."""
    made = []
    for recipe in dict.fromkeys(step.recipe for step in steps):
        own = [step for step in steps if step.recipe == recipe]
        made.append((next((s for s in own if s.tokens >= FROM_TOKENS), own[0]), own[-1]))
    return made


def draw(steps: Sequence[StreamStep]) -> Picture:
    """Draw bytes on the left and time on the right, one line per recipe."""
    if len({step.tokens for step in steps}) < 2:
        raise UserError("the records have one length only: run benchmarks/streams.py growth with more --tokens")
    figure = new_figure(10.4, 4.9)
    for axes, (label, field, unit) in zip(figure.subplots(1, 2), PANELS, strict=True):
        _panel(axes, steps, field, unit)
        axes.set_ylabel(label)
        axes.set_xlabel("tokens of the stream")
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3)
    options = "; ".join(dict.fromkeys(s.recipe.rpartition("+")[0] for s in steps if "+" in s.recipe))
    heading(figure, "Growth of a cache with the context", options)
    return Picture(figure, _alt(steps), [_table(steps)])


def _panel(axes: Axes, steps: Sequence[StreamStep], field: str, unit: float) -> None:
    recipes = list(dict.fromkeys(step.recipe for step in steps))
    for recipe, colour, marker in zip(recipes, CATEGORIES * len(recipes), MARKERS * len(recipes), strict=False):
        own = [step for step in steps if step.recipe == recipe]
        amounts = [getattr(step, field) / unit for step in own]
        axes.plot([s.tokens for s in own], amounts, color=colour, marker=marker, markersize=4.5, label=name(recipe))
    whole = [step for step in steps if not Recipe.parse(step.recipe).policy().drops]
    if whole:
        last, fewest = whole[-1], whole[0].tokens
        top = getattr(last, field) / unit
        axes.plot(
            [fewest, last.tokens], [top * fewest / last.tokens, top], color=GREY, linewidth=0.9,
            linestyle=(0, (4, 3)), label="proportional to tokens", zorder=1,
        )  # fmt: skip
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    tokens = sorted({step.tokens for step in steps})
    axes.set_xticks(tokens, [short_count(n) for n in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True)


def _table(steps: Sequence[StreamStep]) -> KeyFigures:
    rows = [
        [
            *(first.recipe, f"{first.tokens:,}", f"{last.tokens:,}", f"{last.bytes:,.0f}", f"{last.step_us:,.0f}"),
            *(f"{last.bytes / first.bytes:.2f}", f"{last.step_us / first.step_us:.2f}", f"{last.error:.2f}"),
        ]
        for first, last in growth(steps)
    ]
    columns = ("recipe", "from", "to tokens", "bytes", "µs per step", "times the bytes", "times the time", "error")
    return KeyFigures("growth from one length to the last", columns, rows)


def _alt(steps: Sequence[StreamStep]) -> str:
    said = "; ".join(
        f"{name(last.recipe)}: at {last.tokens:,} tokens {last.bytes / first.bytes:.2f} times the bytes and "
        f"{last.step_us / first.step_us:.2f} times the time of {first.tokens:,}"
        for first, last in growth(steps)
    )
    return f"Line charts of bytes held and time per step against the tokens of a stream, both axes logarithmic. {said}."


PLOT = Plot("bytes and time per step against the tokens of a stream (SubGen, Theorem 1)", "streams", draw)
