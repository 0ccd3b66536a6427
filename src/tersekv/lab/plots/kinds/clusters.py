"""Keys and values in the plane, with the centers that SubGen keeps (arXiv 2402.06082, Figure 1).

Each panel is a t-SNE of one head's vectors, keys after RoPE above and values below. It marks the
first points of greedy k-center, which SubGen's practical variant (§3.2) keeps. t-SNE places
neighbours near each other, but its distances have no meaning.

The tables therefore measure distances from vectors to their nearest center: the largest (the
k-center radius) and the mean. Both are divided by the mean distance of two vectors. The result is 0
for at most k distinct vectors and about 1 without clusters. Outliers increase the radius.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tersekv.errors import UserError
from tersekv.lab.plots.base import KeyFigures, ModelKeys, Picture, Plot
from tersekv.lab.plots.style import BLACK, BLUE, LIGHT, RED, YELLOW, heading, new_figure
from tersekv.policies.subgen import farthest_first

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from torch import Tensor

Array = NDArray[np.float32]

MARKED = 16
COUNTS = (16, 32, 64)
"""Numbers of centers to measure. The title gives the results for the middle one."""
SAID = COUNTS[1]
PERPLEXITY = 30
SIDES = ("keys", "values")


class Reach(NamedTuple):
    """Distances to the nearest center, largest and mean, divided by the mean distance of two
    vectors."""

    radius: float
    mean: float


Found = dict[int, dict[str, list[Reach]]]
"""Results by layer and side, for each of `COUNTS`."""
MEASURES = {"radius": "k-center radius", "mean": "mean distance to the nearest center"}


def centers(x: Tensor, k: int) -> Tensor:
    """Return the first k tokens of greedy k-center over x [H, T, D], starting at the first token.

    Returns int64 [H, k], in the order of selection.
    """
    none = torch.zeros(1, *x.shape[:2], dtype=torch.bool)
    first = none.clone()
    first[..., 0] = True
    return farthest_first(x[None], ~none, first, k)[0].argsort(dim=-1, descending=True, stable=True)[:, :k]


def reaches(x: Tensor, counts: Sequence[int] = COUNTS) -> list[Reach]:
    """Measure x [H, T, D] with each number of centers. Results are averaged over heads."""
    x = x.double()
    found = centers(x, max(counts))
    to_centers = torch.cdist(x, x.gather(1, found.unsqueeze(-1).expand(-1, -1, x.shape[-1])))
    T = x.shape[1]
    apart = torch.cdist(x, x).sum((1, 2)) / (T * (T - 1))
    nearest = [to_centers[..., :k].amin(-1) for k in counts]
    return [Reach(float((d.amax(-1) / apart).mean()), float((d.mean(-1) / apart).mean())) for d in nearest]


def embedded(x: Tensor) -> Array:
    """Return the t-SNE of x [T, D] in two dimensions, [T, 2]. It is deterministic."""
    from sklearn.manifold import TSNE

    made = TSNE(perplexity=min(PERPLEXITY, (len(x) - 1) / 3), init="pca", random_state=0, n_jobs=1)
    placed: Array = made.fit_transform(x.float().numpy())
    return placed


def draw(source: ModelKeys) -> Picture:
    """Draw keys above and values below, one column per layer.

    With all heads, the first is drawn and all are measured.
    """
    head, layers = source.head or 0, range(len(source.keys))
    tokens = source.keys[0].shape[1]
    if tokens <= max(COUNTS):
        raise UserError(
            f"{tokens} tokens are too few for clusters: give more than {max(COUNTS)} with --tokens or --max-new-tokens"
        )
    figure = new_figure(3.1 * max(2, len(source.layers)) + 0.4, 6.9)
    grid = figure.subplots(2, len(source.layers), squeeze=False)
    for column, layer in zip(grid.T, source.layers, strict=True):
        for axes, side, x in zip(column, SIDES, (source.of(layer), source.values_of(layer)), strict=True):
            _panel(axes, x[0], RED if side == "keys" else BLUE)
            axes.set_title(f"{side}, layer {layer}, head {head}: radius {reaches(x[:1], [SAID])[0].radius:.2f}")
    found = {i: dict(zip(SIDES, map(reaches, (source.of(i), source.values_of(i))), strict=True)) for i in layers}
    heading(figure, *_claim(source, found))
    lines, names = grid[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=2)
    return Picture(figure, _alt(source, found), _tables(source, found))


def _panel(axes: Axes, x: Tensor, colour: str) -> None:
    places = embedded(x)
    marked = places[centers(x[None], MARKED)[0].numpy()]
    axes.scatter(places[:, 0], places[:, 1], s=5, color=colour, alpha=0.45, linewidths=0)
    look: dict[str, Any] = {
        "color": YELLOW,
        "edgecolors": BLACK,
        "linewidths": 0.9,
        "label": f"the first {MARKED} centers",
    }
    axes.scatter(marked[:, 0], marked[:, 1], s=34, **look)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(LIGHT)


def _compared(found: Found, measure: str) -> tuple[float, float, int]:
    """Compare keys and values with `SAID` centers.

    Returns the means over layers of both, and the number of layers in which keys have the smaller
    value.
    """
    at = COUNTS.index(SAID)
    keys, values = ([getattr(sides[side][at], measure) for sides in found.values()] for side in SIDES)
    return float(np.mean(keys)), float(np.mean(values)), sum(k < v for k, v in zip(keys, values, strict=True))


def _claim(source: ModelKeys, found: Found) -> tuple[str, str]:
    said = [
        f"{name} {keys:.2f} for keys, {values:.2f} for values (smaller for keys in {smaller} of {len(found)} layers)"
        for measure, name in MEASURES.items()
        for keys, values, smaller in [_compared(found, measure)]
    ]
    title = f"Keys and values by t-SNE, {source.caption()}"
    return title, f"{SAID} centers, over the mean distance of two: {said[0]};\n{said[1]}"


def _tables(source: ModelKeys, found: Found) -> list[KeyFigures]:
    columns = ("layer", *(f"{side}, {k} centers" for k in COUNTS for side in SIDES))
    return [
        KeyFigures(
            f"{name} as a share of the mean distance ({source.caption()})",
            columns,
            [
                [str(i), *(f"{getattr(sides[side][at], measure):.3f}" for at in range(len(COUNTS)) for side in SIDES)]
                for i, sides in found.items()
            ],
        )
        for measure, name in MEASURES.items()
    ]


def _alt(source: ModelKeys, found: Found) -> str:
    title, said = _claim(source, found)
    return (
        f"{title}: scatter plots of layers {', '.join(map(str, source.layers))}, keys above and values below, with "
        f"{MARKED} points of greedy k-center marked. Means over all layers with {said}.".replace("\n", " ")
    )


PLOT = Plot("keys and values by t-SNE, with SubGen's centers (SubGen, Figure 1)", "keys", draw, needs=("scikit-learn",))
