"""Mean and spread of key channels before RoPE.

A channel whose mean is many times its spread is nearly the same in all tokens. Methods that rotate
keys spend their codes on it, unless the mean is removed (`centre=true`, docs/methods/trellis.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tersekv.lab.plots.base import KeyFigures, ModelKeys, Picture, Plot
from tersekv.lab.plots.style import CATEGORIES, heading, new_figure

if TYPE_CHECKING:
    from torch import Tensor


def mean_and_spread(keys: Tensor) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation of each channel over tokens, [H·D] each, of keys [H, T, D]."""
    keys = keys.double()
    return keys.mean(1).flatten().numpy(), keys.std(1, correction=0).flatten().numpy()


def mean_in_spreads(keys: Tensor) -> float:
    """Return the length of the mean in units of the spread around it, of the head where it is largest."""
    keys = keys.double()
    spread = keys.var(1, correction=0).sum(-1).sqrt()
    return float((keys.mean(1).norm(dim=-1) / spread.clamp_min(1e-30)).max())


def draw(source: ModelKeys) -> Picture:
    """Draw mean and spread of every channel of the chosen layers, one below the other."""
    figure = new_figure(9.0, 2.2 * len(source.layers) + 0.8)
    panels = figure.subplots(len(source.layers), 1, squeeze=False)[:, 0]
    for axes, layer in zip(panels, source.layers, strict=True):
        mean, spread = mean_and_spread(source.before_of(layer))
        channels = np.arange(len(mean))
        axes.vlines(channels, mean - spread, mean + spread, color=CATEGORIES[0], linewidth=1.4, label="mean ± spread")
        axes.plot(channels, mean, ".", color=CATEGORIES[1], markersize=3, label="mean")
        ratio = mean_in_spreads(source.before_of(layer))
        axes.set_title(f"layer {layer}: the mean is {ratio:.1f} times the spread (widest head)")
        axes.grid(visible=True)
    panels[-1].set_xlabel("channel, all heads")
    panels[0].legend(loc="lower left", ncols=2)
    heading(figure, "Mean and spread of key channels before RoPE", source.caption())
    ratios = [mean_in_spreads(source.before_of(i)) for i in range(len(source.keys))]
    columns, rows = ["layer", "mean / spread"], [[str(i), f"{ratio:.2f}"] for i, ratio in enumerate(ratios)]
    title = f"length of the mean of keys in units of their spread, widest head ({source.caption()})"
    at = int(np.argmax(ratios))
    alt = (
        f"Mean and spread of key channels before RoPE ({source.caption()}). The mean of the keys is largest in "
        f"layer {at}, {ratios[at]:.1f} times their spread; in the median layer {np.median(ratios):.1f} times."
    )
    return Picture(figure, alt, [KeyFigures(title, columns, rows)])


PLOT = Plot("mean and spread of key channels before RoPE", "activations", draw)
