"""Lloyd-Max quantisers: scalar codebooks with the least squared error for a density.

The problem (Lloyd 1982, Max 1960) is solved to 1e-10. A codebook c_1 < … < c_n is optimal if each
entry is the mean of its cell, c_i = E[x | b_{i-1} < x < b_i], with b_i half-way between neighbours.
Lloyd's iteration converges linearly (thousands of steps at 8 bits). We solve the fixed point by
Newton's method, whose Jacobian is tridiagonal. It starts from Panter and Dite's asymptotic codebook
(density^{1/3}). A Lloyd step replaces a Newton step that would change the order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TOLERANCE = 1e-12
MAX_STEPS = 20_000
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True)
class Density:
    """An unnormalised density on [low, high], smooth in between."""

    pdf: Callable[[Array], Array]
    low: float
    high: float


def gaussian() -> Density:
    """Return the density of N(0, 1), truncated at 12 standard deviations."""
    return Density(lambda x: np.exp(-(x**2) / 2), -12.0, 12.0)


def sphere_coordinate(D: int) -> Density:
    """Return the density of √D times a coordinate of a uniform point on the unit sphere in R^D.

    It is (1 − x²/D)^{(D−3)/2} (TurboQuant, Lemma 1).
    """
    if D < 3:
        raise ValueError(f"the density of a sphere's coordinate is bounded from dimension 3 on, got {D}")
    edge = math.sqrt(D)
    reach = min(edge, 12.0)
    return Density(lambda x: np.clip(1 - x**2 / D, 0.0, None) ** ((D - 3) / 2), -reach, reach)


def polar_angle(level: int) -> Density:
    """Return the density of PolarQuant's angles at level 2 and above (Lemma 2).

    It is sin^{2^{ℓ−1}−1}(2ψ) on [0, π/2].
    """
    if level < 2:
        raise ValueError(f"angles of level 1 are uniform on [0, 2π); densities start at level 2, got {level}")
    power = 2 ** (level - 1) - 1
    return Density(lambda x: np.sin(2 * x) ** power, 0.0, math.pi / 2)


def lloyd_max(density: Density, levels: int) -> Array:
    """Return the optimal codebook with `levels` entries, ascending, float64.

    Its fixed-point residual is below 1e-10.
    """
    c = _asymptotic(density, levels)
    for _ in range(MAX_STEPS):
        mean, jacobian = _cells(density, c)
        residual = c - mean
        if float(np.abs(residual).max()) < TOLERANCE * (density.high - density.low):
            return c
        step = c - np.linalg.solve(jacobian, residual)
        inside = step[0] > density.low and step[-1] < density.high and bool(np.all(np.diff(step) > 0))
        c = step if inside and np.abs(step - _cells(density, step)[0]).max() < np.abs(residual).max() else mean
    raise RuntimeError(f"no table of {levels} entries found in {MAX_STEPS} steps")


def mean_squared_error(density: Density, table: Array) -> float:
    """Return E(x − nearest entry)² over the density."""
    edges = _edges(density, table)
    x, w = _quadrature(density, edges)
    total = float(w.sum())
    return float((w * (x - table[:, None]) ** 2).sum()) / total


def _edges(density: Density, c: Array) -> Array:
    return np.concatenate([[density.low], (c[1:] + c[:-1]) / 2, [density.high]])


def _quadrature(density: Density, edges: Array) -> tuple[Array, Array]:
    """Return quadrature nodes and density-weighted weights of each cell, [cells, 64]."""
    half, middle = np.diff(edges)[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
    x = middle + half * _NODES
    return x, half * _WEIGHTS * density.pdf(x)


def _cells(density: Density, c: Array) -> tuple[Array, Array]:
    """Return the cell means and the Jacobian of c − mean(c)."""
    edges = _edges(density, c)
    x, w = _quadrature(density, edges)
    mass = np.maximum(w.sum(1), 1e-300)
    mean = (w * x).sum(1) / mass
    at_edges = density.pdf(edges)
    right = at_edges[1:] * (edges[1:] - mean) / mass / 2
    left = at_edges[:-1] * (mean - edges[:-1]) / mass / 2
    right[-1] = left[0] = 0.0  # the ends of the density are fixed
    jacobian = np.diag(1 - right - left) - np.diag(right[:-1], 1) - np.diag(left[1:], -1)
    return mean, jacobian


def _asymptotic(density: Density, levels: int) -> Array:
    """Return quantiles of density^{1/3}."""
    x = np.linspace(density.low, density.high, 20_001)
    cumulative = np.cumsum(density.pdf(x) ** (1 / 3))
    return np.interp((np.arange(levels) + 0.5) / levels, cumulative / cumulative[-1], x)


@functools.lru_cache(maxsize=64)
def gaussian_table(bits: int) -> tuple[float, ...]:
    """Return the optimal codebook for N(0, 1)."""
    return tuple(lloyd_max(gaussian(), 2**bits).tolist())


@functools.lru_cache(maxsize=64)
def sphere_table(bits: int, D: int) -> tuple[float, ...]:
    """Return the optimal codebook of 2^bits entries for √D times a sphere's coordinate,
    symmetric.
    """
    c = lloyd_max(sphere_coordinate(D), 2**bits)
    return tuple((c - c[::-1]) / 2)


@functools.lru_cache(maxsize=64)
def polar_table(bits: int, level: int) -> tuple[float, ...]:
    """Return PolarQuant's offline codebook of 2^bits angles at `level` ≥ 2, symmetric about π/4."""
    c = lloyd_max(polar_angle(level), 2**bits)
    return tuple((c + (math.pi / 2 - c[::-1])) / 2)
