"""Style of plots, and their conversion to bytes. matplotlib's global state is not changed.

Colours of categories are Okabe and Ito's, which are distinct with any common colour blindness. Heat
maps use viridis, whose lightness grows with the value.
"""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib import style as mpl_style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from tersekv.lab.plots.base import Picture, Plot

BLACK, GREY, LIGHT = "#1a1a1a", "#6b6b6b", "#d9d9d9"
ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    *("#E69F00", "#56B4E9", "#009E73", "#F0E442"),
    *("#0072B2", "#D55E00", "#CC79A7"),
)
CATEGORIES = (BLUE, ORANGE, GREEN, PINK, SKY, RED, BLACK, YELLOW)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

LETTER = 0.089
"""Average width of a letter of a title, in inches."""
_UNDATED: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_WHAT_IT_SHOWS = {"png": "Description", "svg": "Description", "pdf": "Subject"}

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # included in matplotlib, so text has the same size everywhere
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelcolor": BLACK,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": BLACK,
    "ytick.labelcolor": BLACK,
    "legend.frameon": False,
    "figure.titlesize": 11,
    "svg.hashsalt": "tersekv",
    "svg.fonttype": "path",
}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of that size in inches, with a layout that keeps labels separate."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=144)
    FigureCanvasAgg(figure)
    return figure


def heading(figure: Figure, title: str, detail: str = "") -> None:
    """Write a title over the whole figure, flush left, with a second line of details."""
    letters = int(figure.get_figwidth() / LETTER)
    lines = [line for text in (title, detail) if text for line in textwrap.wrap(text, letters)]
    figure.suptitle("\n".join(lines), x=0.01, ha="left")


def render(plot: Plot, source: Any, **options: Any) -> Picture:
    """Draw a plot independently of the user's own matplotlibrc."""
    with mpl_style.context(["default", STYLE]):
        return plot.draw(source, **options)


def to_bytes(picture: Picture, form: str) -> bytes:
    """Return the picture as png, svg or pdf. Equal data gives equal bytes; metadata holds the
    alternative text."""
    metadata = _UNDATED[form] | {_WHAT_IT_SHOWS[form]: picture.alt}
    made = io.BytesIO()
    with mpl_style.context(["default", STYLE]):
        picture.figure.savefig(made, format=form, metadata=metadata)
    return made.getvalue()


def colour_map() -> matplotlib.colors.Colormap:
    """Return the colours of heat maps; missing values are light grey."""
    return matplotlib.colormaps["viridis"].with_extremes(bad=LIGHT)
