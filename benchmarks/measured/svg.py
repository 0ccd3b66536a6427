"""Charts as SVG text: legible in light and dark, the same bytes for the same data.

A chart is 420 units wide, so that it is legible on a phone.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH = 420
LETTER = 7.0
"""Width of a letter of a label."""
STYLE = """\
    text { font: 12.5px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #4a5763; }
    .b { font-size: 14px; font-weight: 600; fill: #1f2933; } .m { text-anchor: middle; } .e { text-anchor: end; }
    .panel { fill: #fbfcfd; stroke: #d5dbe1; } .thin { stroke: #d5dbe1; stroke-width: 1; fill: none; }
    .line { fill: none; stroke-width: 1.8; }
    .s0 { --c: #2e8b6a; } .s1 { --c: #d9822b; } .s2 { --c: #2f6fb5; } .s3 { --c: #a4477f; } .s4 { --c: #7b8794; }
    .s5 { --c: #8a6d1f; } .s6 { --c: #c0392b; } .s7 { --c: #17808f; }
    .dot, .bar { fill: var(--c); } .line { stroke: var(--c); } .key { fill: var(--c); font-weight: 600; }
    @media (prefers-color-scheme: dark) {
      text { fill: #b4bfca; } .b { fill: #e4e9ee; } .panel { fill: #1d2329; stroke: #3a444e; }
      .thin { stroke: #3a444e; } .s0 { --c: #4fb78f; } .s1 { --c: #e69a4c; } .s2 { --c: #5d9bdd; }
      .s3 { --c: #cf7fb0; } .s4 { --c: #98a4b0; } .s5 { --c: #c9a94e; } .s6 { --c: #e57368; } .s7 { --c: #4db3c1; }
    }"""


@dataclass(frozen=True)
class Axis:
    """A scale from values to places: `low` and `high` are drawn at `start` and `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return round(self.start + (self.stop - self.start) * (value - low) / (high - low), 1)


@dataclass
class Chart:
    """A picture that is written part by part."""

    title: str
    about: str
    height: int
    parts: list[str] = field(default_factory=list)
    boxes: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Places of labels and dots, which further labels leave free."""

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write a text."""
        self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{html.escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], style: str) -> None:
        """Draw a line through points."""
        self.parts.append(f'<path class="{style}" d="M{" L".join(f"{x:g} {y:g}" for x, y in points)}"/>')

    def dot(self, x: float, y: float, style: str) -> None:
        """Draw a dot."""
        self.parts.append(f'<circle class="dot {style}" cx="{x:g}" cy="{y:g}" r="4.5"/>')
        self.boxes.append((x - 5, y - 5, x + 5, y + 5))

    def label(self, x: float, y: float, text: str) -> None:
        """Write a label next to a dot, where it hides no other if there is such a place."""
        wide = LETTER * len(text)
        places = [(x + 8, y + 4), (x - 8 - wide, y + 4), (x - wide / 2, y - 9), (x - wide / 2, y + 18)]
        places += [(x + 8, y - 8), (x + 8, y + 16), (x - 8 - wide, y - 8), (x - 8 - wide, y + 16)]
        left, top = min(places, key=lambda at: self._hidden(at[0], at[1], wide))
        self.boxes.append((left, top - 11, left + wide, top + 2))
        self.text(round(left, 1), round(top, 1), text)

    def _hidden(self, left: float, top: float, wide: float) -> float:
        """Return the area of other boxes that a label would hide, and that of the label outside of the picture."""
        right, upper, lower = left + wide, top - 11, top + 2
        hidden = sum(
            max(0.0, min(right, x1) - max(left, x0)) * max(0.0, min(lower, y1) - max(upper, y0))
            for x0, y0, x1, y1 in self.boxes
        )
        return hidden + 13 * (max(0.0, 40 - left) + max(0.0, right - WIDTH + 6))

    def keys(self, y: float, names: Sequence[tuple[str, str]]) -> None:
        """Write a legend in one line, or more: names with their styles."""
        x = 16.0
        for name, style in names:
            wide = 1.12 * LETTER * len(name)
            if x + wide > WIDTH - 10:
                x, y = 16.0, y + 17
            self.text(round(x, 1), y, name, f"key {style}")
            x += wide + 14

    def __str__(self) -> str:
        body = "\n  ".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-labelledby="t d">\n  <title id="t">{html.escape(self.title)}</title>\n'
            f'  <desc id="d">{html.escape(self.about)}</desc>\n  <style>\n{STYLE}\n  </style>\n'
            f'  <rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8"/>\n'
            f'  <text class="b" x="16" y="24">{html.escape(self.title)}</text>\n  {body}\n</svg>\n'
        )


def number(value: float) -> str:
    """Return a number as an axis has it."""
    return f"{value:,g}" if value >= 1 else f"{value:g}".removeprefix("0") or "0"


def grid(chart: Chart, across: Axis, values: Sequence[float], up: Axis, ticks: Sequence[float]) -> None:
    """Draw horizontal lines at `ticks` and write the numbers of both axes."""
    for tick in ticks:
        chart.line([(across.start, up(tick)), (across.stop, up(tick))], "thin")
        chart.text(across.start - 6, up(tick) + 4, number(tick), "e")
    for value in values:
        chart.text(across(value), up.start + 18, number(value), "m")
