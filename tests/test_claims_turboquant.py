"""TurboQuant-MSE (arXiv 2504.19874) and its tables, numerically; rotations are orthogonal and leave the token loop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tersekv.codecs.turboquant import TurboQuant
from tersekv.tables import lloyd_max as lm
from tersekv.transforms.rotation import random_rotation

# positive halves of the tables (unit sphere), and relative squared errors at 1 to 4 bits
TABLES = {
    (64, 2): [0.056515, 0.187497],
    (64, 3): [0.030469, 0.093832, 0.166168, 0.263914],
    (64, 4): [0.015919, 0.048090, 0.081312, 0.116487, 0.154926, 0.198856, 0.252914, 0.330796],
    (128, 2): [0.039992, 0.133042],
    (128, 3): [0.021604, 0.066586, 0.118140, 0.188397],
    (128, 4): [0.011302, 0.034152, 0.057772, 0.082828, 0.110288, 0.141805, 0.180836, 0.237664],
}
ERRORS = {64: [0.358387, 0.114526, 0.033391, 0.009132], 128: [0.360889, 0.116000, 0.033966, 0.009315]}


@pytest.mark.parametrize(("D", "bits"), TABLES)
def test_tables_to_six_digits(D, bits):
    table = np.array(lm.sphere_table(bits, D)) / math.sqrt(D)
    np.testing.assert_allclose(table[2 ** (bits - 1) :], TABLES[D, bits], atol=6e-7)
    np.testing.assert_array_equal(table, -table[::-1])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (2, [0.309756, 0.633980, 0.936816, 1.261040]),
        (3, [0.426250, 0.674385, 0.896411, 1.144547]),
        (4, [0.524214, 0.705909, 0.864887, 1.046582]),
    ],
)
def test_polar_angle_tables_to_six_digits(level, expected):
    np.testing.assert_allclose(lm.polar_table(2, level), expected, atol=6e-7)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(
    "density", [lm.gaussian(), lm.sphere_coordinate(3), lm.sphere_coordinate(256), lm.polar_angle(2), lm.polar_angle(6)]
)
def test_fixed_point_to_1e_10(bits, density):
    """Each entry is the mean of its cell, by quadrature on a grid that the solver does not use."""
    table = lm.lloyd_max(density, 2**bits)
    edges = np.concatenate([[density.low], (table[1:] + table[:-1]) / 2, [density.high]])
    nodes, weights = np.polynomial.legendre.leggauss(200)
    half, middle = np.diff(edges)[:, None] / 2, (edges[1:] + edges[:-1])[:, None] / 2
    x = middle + half * nodes
    w = weights * density.pdf(x)
    assert np.abs((w * x).sum(1) / w.sum(1) - table).max() < 1e-10


def test_densities_that_do_not_exist():
    with pytest.raises(ValueError, match="dimension 3"):
        lm.sphere_coordinate(2)
    with pytest.raises(ValueError, match="start at level 2"):
        lm.polar_angle(1)


@pytest.mark.parametrize("D", ERRORS)
@pytest.mark.parametrize("rotation", ["qr", "hadamard"])
def test_relative_error_to_three_digits(D, rotation):
    x = torch.randn(1, 4, 4096, D, generator=torch.Generator().manual_seed(D))
    for bits, expected in enumerate(ERRORS[D], start=1):
        codec = TurboQuant(bits, rotation)
        error = (codec.decode(codec.encode(x), D) - x).square().sum(-1) / x.square().sum(-1)
        assert float(error.mean()) == pytest.approx(expected, abs=4 * float(error.std()) / math.sqrt(error.numel()))
        assert lm.mean_squared_error(lm.sphere_coordinate(D), np.array(lm.sphere_table(bits, D))) == pytest.approx(
            expected, abs=6e-7
        )


@pytest.mark.parametrize("D", [64, 128])
def test_within_2_72_of_the_shannon_bound(D):
    """Theorem 1: the error is at most √3·π/2 = 2.72 times 4^-b."""
    for bits in range(1, 9):
        error = lm.mean_squared_error(lm.sphere_coordinate(D), np.array(lm.sphere_table(bits, D)))
        assert 4.0**-bits < error < 2.7207 * 4.0**-bits


def test_inner_products_are_biased_towards_zero_by_the_error():
    """E⟨q, x̂⟩ = (1 − MSE)·⟨q, x⟩ for a table of cell means, averaged over rotations."""
    x = torch.randn(1, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    for bits in (1, 2):
        factors = []
        for seed in range(200):
            codec = TurboQuant(bits, seed=seed)
            decoded = codec.decode(codec.encode(x), 64)
            factors.append((decoded * x).sum(-1) / x.square().sum(-1))
        factor = torch.stack(factors).mean(0)
        spread = torch.stack(factors).std(0) / math.sqrt(200)
        assert ((factor - (1 - ERRORS[64][bits - 1])).abs() < 5 * spread).all()


def test_correct_norm_keeps_lengths():
    x = torch.randn(1, 2, 64, 64)
    codec = TurboQuant(2, correct_norm=True)
    ratio = codec.decode(codec.encode(x), 64).norm(dim=-1) / x.norm(dim=-1)
    assert (ratio - 1).abs().max() < 2**-10  # float16's rounding of the norm


@pytest.mark.parametrize("D", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("kind", ["qr", "hadamard"])
def test_rotations_are_orthogonal_and_repeatable(D, kind):
    R = random_rotation(D, 5, kind)
    torch.testing.assert_close(R @ R.T, torch.eye(D), atol=1e-6, rtol=0)
    random_rotation.cache_clear()
    assert torch.equal(R, random_rotation(D, 5, kind))
    assert not torch.equal(R, random_rotation(D, 6, kind))


def test_outlier_channels_do_not_hurt():
    """Rotated, a channel of fifty times the size raises the relative error by nothing; per token without rotation it
    does."""
    x = torch.randn(1, 2, 512, 64, generator=torch.Generator().manual_seed(0))
    x[..., 3] *= 50
    codec = TurboQuant(4)
    error = (codec.decode(codec.encode(x), 64) - x).square().sum(-1) / x.square().sum(-1)
    assert float(error.mean()) == pytest.approx(ERRORS[64][3], rel=0.25)
