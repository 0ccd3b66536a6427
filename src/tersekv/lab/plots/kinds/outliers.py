"""Outliers of keys before and after RoPE and of values (KVQuant, arXiv 2401.18079, Figures 2 and 4).

Above, |x| by token and channel of one layer, where keys before RoPE have the same large channels at
all tokens. Below, the part of a layer's dynamic range (its largest magnitude) within which a share of
the elements lies. Where 99 % of them lie in a small part, few outliers set the range of all codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tersekv.lab.plots.base import KeyFigures, ModelKeys, Picture, Plot
from tersekv.lab.plots.kinds.magnitudes import by_token, channel_rms
from tersekv.lab.plots.style import CATEGORIES, heading, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

SHARES = (0.5, 0.9, 0.99, 0.999)
WIDEST = 3
"""Number of layers shown above."""


def parts_of_range(x: Tensor) -> NDArray[np.float64]:
    """Return, for each of SHARES, the smallest magnitude that so many elements do not exceed, divided
    by the largest magnitude; 0 if all elements are 0."""
    magnitudes = np.sort(x.abs().double().flatten().numpy())
    ends = np.ceil(np.array(SHARES) * len(magnitudes)).astype(int) - 1
    return magnitudes[ends] / (magnitudes[-1] or 1.0)


def channel_ratio(x: Tensor) -> float:
    """Return the largest channel's root mean square divided by the median channel's."""
    sizes = channel_rms(x)
    return float(sizes.max() / (np.median(sizes) or np.nan))


def draw(source: ModelKeys) -> Picture:
    """Draw the three kinds of activations of the chosen layers above, and parts of the range by layer
    below."""
    kinds = {"keys before RoPE": source.before_of, "keys after RoPE": source.of, "values": source.values_of}
    layers = source.layers[:WIDEST]
    figure = new_figure(11.0, 2.6 * len(layers) + 3.0)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(2.6 * len(layers), 3.0))[:, 0]
    panels = above.subplots(len(layers), len(kinds), squeeze=False, sharey=True)
    for row, layer in zip(panels, layers, strict=True):
        for axes, (name, of) in zip(row, kinds.items(), strict=True):
            by_token(above, axes, of(layer), f"|{name}|, layer {layer}")
        row[0].set_ylabel("token")
    for axes in panels[-1]:
        axes.set_xlabel("channel, all heads")
    parts = {name: np.stack([parts_of_range(of(i)) for i in range(len(source.keys))]) for name, of in kinds.items()}
    lower = below.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for axes, (name, found) in zip(lower, parts.items(), strict=True):
        _by_layer(axes, name, found)
    lower[0].set_ylabel("magnitude / largest of the layer")
    handles, labels = lower[0].get_legend_handles_labels()
    below.legend(handles, labels, loc="outside lower center", ncols=len(SHARES))
    heading(figure, "Outliers: magnitudes, and the part of the range that holds most elements", source.caption())
    ratios = {name: [channel_ratio(of(i)) for i in range(len(source.keys))] for name, of in kinds.items()}
    return Picture(figure, _alt(source, parts, ratios), [_table(source, parts, ratios)])


def _by_layer(axes: Axes, name: str, parts: NDArray[np.float64]) -> None:
    for share, colour, line in zip(SHARES, CATEGORIES, parts.T, strict=False):
        axes.plot(line, color=colour, label=f"{100 * share:g} % of elements", linewidth=1.6)
    axes.set_title(name)
    axes.set_xlabel("layer")
    axes.set_ylim(0, 1)
    axes.grid(visible=True)


def _table(source: ModelKeys, parts: dict[str, NDArray[np.float64]], ratios: dict[str, list[float]]) -> KeyFigures:
    columns = ["activations", *(f"{100 * share:g} %" for share in SHARES), "largest / median channel"]
    rows = [
        [name, *(f"{np.median(found[:, i]):.3f}" for i in range(len(SHARES))), f"{np.median(ratios[name]):.1f}"]
        for name, found in parts.items()
    ]
    title = f"part of the range that holds a share of the elements, median layer ({source.caption()})"
    return KeyFigures(title, columns, rows)


def _alt(source: ModelKeys, parts: dict[str, NDArray[np.float64]], ratios: dict[str, list[float]]) -> str:
    at = SHARES.index(0.99)
    said = "; ".join(
        f"{name}: 99 % of the elements within {np.median(found[:, at]):.0%} of the range, largest channel "
        f"{np.median(ratios[name]):.1f} times the median one"
        for name, found in parts.items()
    )
    return f"Heat maps of magnitude by token and channel, and parts of the range by layer ({source.caption()}). {said}."


PLOT = Plot("outliers of keys before and after RoPE and of values (KVQuant, Figures 2 and 4)", "activations", draw)
