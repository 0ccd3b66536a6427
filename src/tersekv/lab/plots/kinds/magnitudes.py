"""Magnitude of a model's keys by channel and token, and by channel and layer (QJL, arXiv
2406.03482, Figure 2).

In the deeper layers a few channels are much larger than the others for all tokens. A method must
store them as outliers, rotate them away or scale each channel. Their size is measured as the ratio
of the largest channel's root mean square to the median channel's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tersekv.lab.plots.base import KeyFigures, ModelKeys, Picture, Plot
from tersekv.lab.plots.style import colour_map, heading, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure
    from torch import Tensor

Array = NDArray[np.float32]

MARKS_ABOVE, MARKS_BELOW = 7, 26
"""Approximate number of channel and head labels under a narrow and a wide panel."""


def side_by_side(keys: Tensor) -> Array:
    """Return |k| of keys [H, T, D] as [T, H·D], with the heads' channels next to each other."""
    return keys.abs().transpose(0, 1).flatten(1).float().numpy()


def channel_rms(keys: Tensor) -> Array:
    """Return the root mean square over tokens of each channel, [H·D], of keys [H, T, D]."""
    return keys.double().square().mean(1).sqrt().flatten().float().numpy()


def draw(source: ModelKeys) -> Picture:
    """Draw |key| by token and channel for the chosen layers above, and channels by layer below."""
    rms = np.stack([channel_rms(source.of(layer)) for layer in range(len(source.keys))])
    heads, _, D = source.of(0).shape
    figure = new_figure(3.4 * max(2, len(source.layers)) + 0.4, 7.2)
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.05))[:, 0]
    panels = above.subplots(1, len(source.layers), squeeze=False, sharey=True)[0]
    for axes, layer in zip(panels, source.layers, strict=True):
        by_token(above, axes, source.of(layer), f"|key|, layer {layer}")
        _mark_heads(axes, heads, D, source.head, MARKS_ABOVE)
    panels[0].set_ylabel("token")
    axes = below.subplots()
    _by_layer(below, axes, rms)
    _mark_heads(axes, heads, D, source.head, MARKS_BELOW)
    heading(figure, "Magnitude of keys: a few channels outweigh the others", source.caption())
    return Picture(figure, _alt(source, rms), [_table(source, rms, D)])


def by_token(figure: SubFigure, axes: Axes, x: Tensor, title: str) -> None:
    """Draw |x| of x [H, T, D] by token and channel."""
    image = axes.imshow(side_by_side(x), aspect="auto", cmap=colour_map(), interpolation="antialiased", vmin=0)
    axes.set_title(title)
    figure.colorbar(image, ax=axes, pad=0.02)


def _by_layer(figure: SubFigure, axes: Axes, rms: Array) -> None:
    image = axes.imshow(rms, aspect="auto", cmap=colour_map(), interpolation="nearest", vmin=0)
    axes.set_title("root mean square over tokens, every layer")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, pad=0.01)


def _mark_heads(axes: Axes, heads: int, D: int, only: int | None, most: int) -> None:
    """Draw lines between heads and about `most` tick labels: channels if there is room, and heads."""
    for edge in range(1, heads):
        axes.axvline(edge * D - 0.5, color="white", linewidth=0.8 if heads <= 12 else 0.3)
    parts = max(1, most // heads) // 2 * 2 or 1
    step = max(1, D // parts)
    middle = D // 2 // step * step
    named = range(0, heads, -(-heads // most))
    marks = [(head, channel) for head in named for channel in range(0, D, step)]
    names = [
        f"{channel if parts > 1 else ''}\nhead {head if only is None else only}" if channel == middle else f"{channel}"
        for head, channel in marks
    ]
    axes.set_xticks([head * D + channel for head, channel in marks], names)
    axes.set_xlabel("channel")


def _table(source: ModelKeys, rms: Array, D: int) -> KeyFigures:
    rows = []
    first = 0 if source.head is None else source.head
    for layer, sizes in enumerate(rms):
        largest, median = int(sizes.argmax()), float(np.median(sizes))
        where = f"head {first + largest // D}, channel {largest % D}"
        ratio = sizes[largest] / median if median else float("nan")
        rows.append([str(layer), f"{median:.2f}", f"{sizes[largest]:.2f}", f"{ratio:.1f}", where])
    title = f"root mean square of key channels ({source.caption()})"
    return KeyFigures(title, ("layer", "median channel", "largest channel", "largest / median", "which"), rows)


def _alt(source: ModelKeys, rms: Array) -> str:
    ratios = rms.max(1) / np.maximum(np.median(rms, 1), 1e-30)
    worst = int(ratios.argmax())
    return (
        f"Heat maps of key magnitude ({source.caption()}) by token and channel in layers "
        f"{', '.join(map(str, source.layers))}, and by channel in all {len(rms)} layers. The largest channel is "
        f"{ratios[worst]:.1f} times the median one in layer {worst}, {np.median(ratios):.1f} times in the median layer."
    )


PLOT = Plot("magnitude of keys by channel, token and layer (QJL, Figure 2)", "keys", draw)
