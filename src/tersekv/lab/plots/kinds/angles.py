"""Polar angles of a model's keys, with and without a random rotation (PolarQuant, arXiv 2502.02617,
Figure 2).

After a random rotation, angles of level ℓ ≥ 2 should have density ∝ sin^{2^{ℓ−1}−1}(2ψ) on [0,
π/2], and those of level 1 should be uniform on [0, 2π) (Lemma 2). One codebook of angles then
serves every model. Unrotated keys follow these densities only roughly. The Kolmogorov-Smirnov
distance, the largest gap between the two cumulative distributions, measures the deviation.

Lemma 2 averages over rotations. A cache uses one rotation, which leaves a trace of any direction
that the keys share. The distance therefore does not fall to zero.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tersekv.codecs.codebooks.lloyd_max import polar_angle
from tersekv.errors import UserError
from tersekv.lab.plots.base import KeyFigures, ModelKeys, Picture, Plot
from tersekv.lab.plots.style import BLACK, BLUE, RED, heading, new_figure
from tersekv.transforms.polar import to_polar
from tersekv.transforms.rotation import random_rotation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

Array = NDArray[np.float64]

LEVELS = 4
BINS = 64
ROTATION_SEED = 0
"""Default seed of recipe `polarquant`."""
KINDS = {"as they are": RED, "rotated": BLUE}


def densities(level: int) -> tuple[Array, Array, Array]:
    """Return angles, their density by Lemma 2, and its cumulative distribution, [4097] each."""
    high = 2 * math.pi if level == 1 else math.pi / 2
    x = np.linspace(0, high, 4097)
    pdf = np.ones_like(x) if level == 1 else polar_angle(level).pdf(x)
    cumulative = np.concatenate([[0.0], np.cumsum((pdf[1:] + pdf[:-1]) / 2 * np.diff(x))])
    return x, pdf / cumulative[-1], cumulative / cumulative[-1]


def ks_distance(angles: Array, level: int) -> float:
    """Return the largest gap between the cumulative distributions of the angles [n] and of Lemma 2."""
    x, _, cumulative = densities(level)
    expected = np.interp(np.sort(angles), x, cumulative)
    steps = np.arange(len(angles) + 1) / len(angles)
    return float(max((steps[1:] - expected).max(), (expected - steps[:-1]).max()))


def angles_by_level(keys: Tensor) -> dict[str, list[Array]]:
    """Return the angles per level, [n] each, of keys [H, T, D] without and with rotation."""
    D = keys.shape[-1]
    levels = min(LEVELS, (D & -D).bit_length() - 1)
    if not levels:
        raise UserError(f"the keys have {D} channels, an odd number: polar angles need pairs of channels")
    keys = keys.double()
    rotated = keys @ random_rotation(D, ROTATION_SEED).double().T
    return {
        kind: [a.flatten().numpy() for a in to_polar(x, levels)[0]]
        for kind, x in zip(KINDS, (keys, rotated), strict=True)
    }


def draw(source: ModelKeys) -> Picture:
    """Draw one row per layer and one column per level."""
    found = {layer: angles_by_level(source.of(layer)) for layer in source.layers}
    levels = len(found[source.layers[0]]["rotated"])
    figure = new_figure(2.6 * levels + 0.6, 1.9 * len(found) + 1.3)
    grid = figure.subplots(len(found), levels, squeeze=False, sharex="col", sharey="col")
    rows: list[list[str]] = []
    for row, (layer, kinds) in zip(grid, found.items(), strict=True):
        for level, axes in enumerate(row, 1):
            samples = {kind: angles[level - 1] for kind, angles in kinds.items()}
            distances = {kind: ks_distance(x, level) for kind, x in samples.items()}
            _panel(axes, level, samples, distances)
            rows.append(
                [str(layer), str(level), *(f"{d:.3f}" for d in distances.values()), f"{samples['rotated'].size:,}"]
            )
        row[0].set_ylabel(f"layer {layer}\ndensity")
    for level, axes in enumerate(grid[0], 1):
        axes.set_title(f"level {level}")
        axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    for axes in grid[-1]:
        axes.set_xlabel("angle (radians)")
    heading(figure, "Polar angles of keys, against the density that PolarQuant's tables are made for", source.caption())
    lines, names = grid[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3)
    return Picture(figure, _alt(source, rows), [_table(source, rows)])


def _panel(axes: Axes, level: int, samples: dict[str, Array], distances: dict[str, float]) -> None:
    x, pdf, _ = densities(level)
    edges = np.linspace(0, x[-1], BINS + 1)
    for (kind, colour), height in zip(KINDS.items(), (1.0, 0.89), strict=True):
        density = np.histogram(samples[kind], edges, density=True)[0]
        axes.stairs(density, edges, color=colour, label=kind, linewidth=1.3, baseline=None)
        axes.text(
            0.98, height, f"KS {distances[kind]:.3f}", transform=axes.transAxes, ha="right", va="top",
            color=colour, fontsize=8, fontweight="bold",
        )  # fmt: skip
    axes.plot(x, pdf, color=BLACK, linewidth=1.1, linestyle=(0, (4, 2)), label="theory (Lemma 2)")
    names = ("0", "π", "2π") if level == 1 else ("0", "π/4", "π/2")
    axes.set_xticks([0, x[-1] / 2, x[-1]], names)
    axes.set_xlim(0, x[-1])


def _table(source: ModelKeys, rows: list[list[str]]) -> KeyFigures:
    title = f"Kolmogorov-Smirnov distance of key angles to Lemma 2's densities ({source.caption()})"
    return KeyFigures(title, ("layer", "level", *KINDS, "angles"), rows)


def _alt(source: ModelKeys, rows: list[list[str]]) -> str:
    plain, rotated = (np.mean([float(row[i]) for row in rows]) for i in (2, 3))
    return (
        f"Histograms of the polar angles of keys ({source.caption()}) by layer and level, as they are and randomly "
        f"rotated, against the theoretical density. Mean Kolmogorov-Smirnov distance: {plain:.3f} as they are, "
        f"{rotated:.3f} rotated."
    )


PLOT = Plot("polar angles of keys, with and without rotation (PolarQuant, Figure 2)", "keys", draw)
