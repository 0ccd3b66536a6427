"""k-means in one dimension: the exact optimum, weights, and the quality of groups and Lloyd's iteration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tersekv.codecs.codebooks import kmeans as km
from tersekv.codecs.codebooks.lloyd_max import gaussian, lloyd_max


def brute_force(x: np.ndarray, w: np.ndarray, k: int) -> float:
    """Return the least squared error over all partitions of the sorted samples."""
    order = np.argsort(x)
    x, w = x[order], w[order]

    def cost(a: int, b: int) -> float:
        return float((w[a:b] * (x[a:b] - np.average(x[a:b], weights=w[a:b])) ** 2).sum())

    cuts = itertools.combinations(range(1, len(x)), k - 1)
    return min(sum(cost(a, b) for a, b in itertools.pairwise((0, *cut, len(x)))) for cut in cuts)


def error(x: np.ndarray, table: np.ndarray, w: np.ndarray) -> float:
    return float((w * ((x[:, None] - table) ** 2).min(1)).sum())


@given(
    st.lists(st.tuples(st.integers(-20, 20), st.integers(1, 5)), min_size=2, max_size=9, unique_by=lambda p: p[0]),
    st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_exact_optimum(points, k):
    x, w = np.array(points, float).T
    table = km.kmeans(x, k, w)
    assert len(table) == k
    assert (np.diff(table) >= 0).all()
    expected = brute_force(x, w, k) if k < len(x) else 0.0
    assert error(x, table, w) == pytest.approx(expected, abs=1e-9)


def test_weights_count_like_repeats():
    x = np.array([0.0, 1, 2, 10, 11, 30])
    w = np.array([1, 5, 2, 3, 1, 2])
    np.testing.assert_allclose(km.kmeans(x, 3, w), km.kmeans(np.repeat(x, w), 3), rtol=1e-12)
    np.testing.assert_allclose(km.kmeans(x, 2, [1, 1, 2, 0, 0, 0]), [0.5, 2])


def test_fewer_samples_than_entries():
    assert km.kmeans([2.0, 1.0, 2.0], 4).tolist() == [1, 2, 2, 2]


def test_far_from_zero_keeps_its_digits():
    x = 1e8 + np.array([0.0, 1, 10, 11])
    np.testing.assert_allclose(km.kmeans(x, 2), 1e8 + np.array([0.5, 10.5]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", [4, 16])
def test_few_groups_come_close_to_the_optimum(k, monkeypatch):
    x = np.random.default_rng(k).normal(size=3000)
    best = error(x, km.kmeans(x, k), np.ones(3000))
    monkeypatch.setattr(km, "EXACT_SAMPLES", 100)
    assert best <= error(x, km.kmeans(x, k), np.ones(3000)) < 1.03 * best


@pytest.mark.parametrize("k", [8, 16, 32])
def test_heavy_tails_and_weights_find_the_optimum(k):
    """k-means++ is 3 to 11 % above the optimum here, because a few samples have most of the weight."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_t(3, 50_000), np.exp(3 * rng.normal(size=50_000))
    points = km.Sorted(x, w)
    assert points.error(km.kmeans(x, k, w)) < 1.001 * points.error(km.optimum(points, k))


@pytest.mark.parametrize("kind", ["far outlier", "heavy sample", "both"])
def test_groups_are_enough_where_one_sample_dominates(kind):
    x, w = np.random.default_rng(0).normal(size=20_000), np.ones(20_000)
    if kind != "heavy sample":
        x[0] = 1e6
    if kind != "far outlier":
        w[1] = 1e8
    points = km.Sorted(x, w)
    assert points.error(km.kmeans(x, 16, w)) < 1.02 * points.error(km.optimum(points, 16))


def test_many_gaussian_samples_find_the_lloyd_max_table():
    x = np.random.default_rng(0).normal(size=200_000)
    np.testing.assert_allclose(km.kmeans(x, 4), lloyd_max(gaussian(), 4), atol=0.02)


@pytest.mark.parametrize(
    ("x", "k", "w", "text"),
    [
        ([], 2, None, "at least one sample"),
        ([1.0, np.nan], 2, None, "all finite"),
        ([1.0], 0, None, "k ≥ 1"),
        ([1.0, 2.0], 1, [1.0], "one weight per sample"),
        ([1.0, 2.0], 1, [-1.0, 1.0], "not negative"),
        ([1.0, 2.0], 1, [0.0, 0.0], "not all 0"),
    ],
)
def test_wrong_input(x, k, w, text):
    with pytest.raises(ValueError, match=text):
        km.kmeans(x, k, w)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["ulps", "heavy weights", "far away"]))
@settings(max_examples=200, deadline=None)
def test_tables_are_finite_and_ascend(seed, kind):
    """Samples a few units in the last place apart, weights over thirty decades, samples far from
    zero."""
    rng = np.random.default_rng(seed)
    n, k = int(rng.integers(1, 60)), int(rng.integers(1, 33))
    x, w = rng.normal(size=n), None
    if kind == "ulps":
        x = (np.float32(1.3) * (1 + 1e-7 * rng.integers(-3, 4, n))).astype(np.float32)
    elif kind == "heavy weights":
        w = 10 ** rng.uniform(-15, 15, n)
    else:
        x = 1e9 + x
    table = km.kmeans(x, k, w)
    assert np.isfinite(table).all()
    assert (np.diff(table) >= 0).all()
    assert x.min() <= table[0]
    assert table[-1] <= x.max()


def test_samples_that_hardly_differ_are_told_apart():
    x = 1.0 + np.array([0, 1, 10, 11]) * 2.0**-50
    np.testing.assert_allclose((km.kmeans(x, 2) - 1) * 2.0**50, [0.5, 10.5], atol=0.5)


@pytest.mark.parametrize("name", ["normal", "heavy tails", "few values", "two far clusters"])
def test_bins_stand_for_many_samples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more samples than bins, entries move by about a bin's width for any distribution and
    weights."""
    rng = np.random.default_rng(0)
    n = km.BINS + 40_000
    x = {
        "normal": rng.normal(size=n),
        "heavy tails": rng.standard_cauchy(n).clip(-1e3, 1e3),
        "few values": rng.integers(0, 40, n) / 7,
        "two far clusters": np.concatenate([rng.normal(size=n // 2), 1e4 + rng.normal(size=n - n // 2)]),
    }[name]
    weights = rng.exponential(size=n)
    table = km.kmeans(x, 8, weights)
    monkeypatch.setattr(km, "BINS", n)
    exact = km.kmeans(x, 8, weights)
    best, found = (km.Sorted(x, weights).error(t) / weights.sum() for t in (exact, table))
    assert found <= best * 1.001 + (np.ptp(x) / 2**18) ** 2
