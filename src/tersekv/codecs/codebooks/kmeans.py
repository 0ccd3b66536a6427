"""Weighted k-means in one dimension: codebooks with the least squared error for samples.

In one dimension clusters are intervals of the sorted samples. For few samples the optimum is found
exactly by dynamic programming over the intervals' ends, O(k·n·log n) (Wu 1991; Grønlund et al.,
arXiv 1701.07204). Many samples are first put into at most EXACT_SAMPLES groups of neighbours. The
groups' optimum is where Lloyd's iteration over all samples starts. Each of its steps costs
O(k·log n) with prefix sums. Random seeding (k-means++) is not used, because its local optima have
up to 20 % more error where a few samples have most of the weight.

More than BINS samples are put into bins of equal width instead of being sorted. Each bin counts as
its mean. A codebook entry is then off by at most a bin's width, 4·10⁻⁶ of the samples' range. Equal
samples give equal codebooks.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from tersekv.kernels.encode_grid import nearest_code

Array = NDArray[np.float64]

EXACT_SAMPLES = 4096
"""Maximum number of distinct samples, or groups of samples, for which the optimum is found exactly."""

BINS = 1 << 18
"""Maximum number of samples that are sorted."""

LEAST_WEIGHT = 1e-9
MAX_STEPS = 300


class Sorted:
    """Distinct samples, ascending, with prefix sums of weight, weight·x and weight·x²."""

    def __init__(self, x: Array, weights: Array | None) -> None:
        order = np.argsort(x)
        x = x[order]
        first = np.flatnonzero(np.concatenate([[True], x[1:] != x[:-1]]))
        self.x = x[first]
        w = np.ones(len(x)) if weights is None else weights[order]
        self.w = np.add.reduceat(w, first)
        # sums about the mean lose less precision
        self.origin = float(np.average(self.x, weights=self.w))
        self.centred = self.x - self.origin
        self.sum_w, self.sum_x, self.sum_xx = (
            np.concatenate([[0.0], np.cumsum(self.w * self.centred**power)]) for power in (0, 1, 2)
        )

    def grouped(self, groups: int) -> Sorted:
        """Replace the samples by at most `groups` means of neighbours.

        A third of the groups' ends is at equal distances, because an error grows with the square of a group's width.
        Another third is at equal weights and the last at equal counts, so that a far outlier or a heavy sample does
        not leave too few groups.
        """
        ends = np.linspace(0, 1, groups // 3 + 1)[1:-1]
        by_width = np.searchsorted(self.x, self.x[0] + ends * (self.x[-1] - self.x[0]))
        by_weight = np.searchsorted(self.sum_w, ends * self.sum_w[-1])
        by_count = (ends * len(self.x)).astype(np.int64)
        edges = np.unique(np.concatenate([[0], by_width, by_weight, by_count, [len(self.x)]]))
        weight = np.diff(self.sum_w[edges])
        return Sorted(self.means(edges)[weight > 0], weight[weight > 0])

    def cost(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> Array:
        """Return the squared error of one cluster of the samples start ≤ i < stop."""
        w = self.sum_w[stop] - self.sum_w[start]
        s = self.sum_x[stop] - self.sum_x[start]
        return np.maximum(self.sum_xx[stop] - self.sum_xx[start] - s * s / np.where(w > 0, w, 1.0), 0.0)

    def means(self, edges: NDArray[np.int64]) -> Array:
        """Return the means of the clusters between neighbouring edges (indices), NaN for empty
        ones.
        """
        w = np.diff(self.sum_w[edges])
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.diff(self.sum_x[edges]) / w + self.origin

    def error(self, table: Array) -> float:
        """Return the total squared error to the nearest entry of an ascending codebook."""
        edges = self.edges(table)
        return float(self.cost(edges[:-1], edges[1:]).sum() + self._offset(edges, table))

    def _offset(self, edges: NDArray[np.int64], table: Array) -> float:
        mean = self.means(edges)
        return float(np.nansum(np.diff(self.sum_w[edges]) * (mean - table) ** 2))

    def edges(self, table: Array) -> NDArray[np.int64]:
        """Return the indices at which the nearest entry changes, with both ends."""
        inner = np.searchsorted(self.x, (table[1:] + table[:-1]) / 2)
        return np.concatenate([[0], inner, [len(self.x)]])


def kmeans(samples: ArrayLike, k: int, weights: ArrayLike | None = None) -> Array:
    """Return a codebook of k entries, ascending, float64, for samples [n].

    weights: [n], ≥ 0; 1 if not given. Weights below LEAST_WEIGHT of the largest count as 0, because
        prefix sums cannot resolve them.

    With fewer distinct samples than entries, the last entries repeat the largest sample.

    Raises:
        ValueError: no samples, samples or weights that are not finite, negative weights, or all
            weights 0.
    """
    x = np.asarray(samples, np.float64).ravel()
    w = None if weights is None else np.asarray(weights, np.float64).ravel()
    if not len(x) or k < 1 or not np.isfinite(x).all():
        raise ValueError(f"k-means takes at least one sample, all finite, and k ≥ 1; got {len(x)} samples and k = {k}")
    if w is not None:
        if w.shape != x.shape or not np.isfinite(w).all() or (w < 0).any() or not w.any():
            raise ValueError("k-means takes one weight per sample, finite, not negative, and not all 0")
        counts = w > LEAST_WEIGHT * w.max()
        x, w = x[counts], w[counts] / w.max()
    low, high = float(x.min()), float(x.max())
    if low == high:
        return np.full(k, low)
    # scaling keeps the precision of samples that hardly differ
    x = (x - low) / (high - low)
    table = _table(Sorted(*(binned(x, w) if len(x) > BINS else (x, w))), k)
    return np.sort(np.clip(table * (high - low) + low, low, high))


def binned(x: Array, weights: Array | None) -> tuple[Array, Array]:
    """Return mean and weight of the samples (between 0 and 1) in each non-empty bin."""
    index = np.minimum((x * BINS).astype(np.int64), BINS - 1)
    w = np.bincount(index, weights, BINS).astype(np.float64)
    s = np.bincount(index, x if weights is None else weights * x, BINS)
    return s[w > 0] / w[w > 0], w[w > 0]


def _table(points: Sorted, k: int) -> Array:
    """Return entries for at least two distinct samples between 0 and 1."""
    if len(points.x) <= k:
        return np.concatenate([points.x, np.full(k - len(points.x), points.x[-1])])
    if len(points.x) <= EXACT_SAMPLES:
        return optimum(points, k)
    return lloyd(points, _table(points.grouped(EXACT_SAMPLES), k))


def optimum(points: Sorted, k: int) -> Array:
    """Return the optimal codebook by dynamic programming, for more than k distinct samples."""
    n = len(points.x)
    ends = np.arange(n + 1)
    best = points.cost(np.zeros(n + 1, np.int64), ends)  # best[j]: samples before j in one cluster
    starts = []
    for _ in range(k - 1):
        best, start = _one_more_cluster(points, best)
        starts.append(start)
    edges = [n]
    for start in reversed(starts):
        edges.append(int(start[edges[-1]]))
    bounds = np.array([0, *reversed(edges)])
    means = points.means(bounds)
    # a cluster may be empty if its gain is below rounding errors
    return np.where(np.isfinite(means), means, points.x[np.minimum(bounds[:-1], n - 1)])


def _one_more_cluster(points: Sorted, best: Array) -> tuple[Array, NDArray[np.int64]]:
    """Return min over i ≤ j of best[i] + cost(i, j) for every j, and the smallest i that attains
    it.

    This i never decreases with j, so the result at j bounds those on both sides. Midpoints of ever
    smaller intervals are solved level by level, each level with at most 2n candidates in all.
    """
    n = len(best) - 1
    value, choice = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64)
    low, high = np.array([0]), np.array([n])  # open intervals of j, with the bounds of their i
    first, last = np.array([0]), np.array([n])
    while len(low):
        middle = (low + high) // 2
        reach = np.minimum(last, middle)
        counts = reach - first + 1
        begin = np.concatenate([[0], np.cumsum(counts)[:-1]])
        i = np.arange(counts.sum()) - np.repeat(begin - first, counts)
        total = best[i] + points.cost(i, np.repeat(middle, counts))
        value[middle] = np.minimum.reduceat(total, begin)
        attained = np.where(total == np.repeat(value[middle], counts), i, n)
        choice[middle] = np.minimum.reduceat(attained, begin)
        left, right = low < middle, middle < high
        low, high, first, last = (
            np.concatenate([low[left], middle[right] + 1]),
            np.concatenate([middle[left] - 1, high[right]]),
            np.concatenate([first[left], choice[middle][right]]),
            np.concatenate([choice[middle][left], last[right]]),
        )
    return value, choice


def lloyd(points: Sorted, table: Array) -> Array:
    """Run Lloyd's iteration until the clusters are stable.

    An entry with an empty cluster is unchanged.
    """
    edges = points.edges(table)
    for _ in range(MAX_STEPS):
        mean = points.means(edges)
        table = np.where(np.isnan(mean), table, mean)
        after = points.edges(table)
        if np.array_equal(edges, after):
            break
        edges = after
    return table


def weighted_codebook(y: Tensor, weight: Tensor, bits: int, match_moments: bool) -> tuple[Tensor, Tensor]:
    """Return the codebook of 2^bits entries for values y in [−1, 1], and the one for decoding.

    weight: of each value; if all are 0, values count equally.
    match_moments: the decoded values get the mean and standard deviation of y (KVQuant's Q-Norm).
    """
    w = weight if bool(weight.any()) else torch.ones_like(weight)
    table = torch.from_numpy(kmeans(y.clamp(-1, 1).cpu().numpy(), 2**bits, w.cpu().numpy())).float()
    if not match_moments:
        return table, table
    coded = table[nearest_code(y.cpu(), table).long()]
    spread = coded.std(unbiased=False)
    factor = y.std(unbiased=False).cpu() / spread if spread > 0 else torch.ones(())
    return table, (table - coded.mean()) * factor + y.mean().cpu()
