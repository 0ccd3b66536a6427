"""TurboQuant's claims (arXiv 2504.19874), numerically: codebooks, errors, bounds, biases and
outlier channels.

Rotations are orthogonal and are not part of the token loop.
"""

from __future__ import annotations

import dataclasses
import math
import weakref

import numpy as np
import pytest
import torch

from tersekv.codecs.codebooks import lloyd_max as lm
from tersekv.codecs.turboquant import TurboQuant
from tersekv.errors import UserError
from tersekv.transforms.rotation import random_rotation

# Positive halves of the codebooks (unit sphere), and relative squared errors at 1 to 4 bits.
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
        codec = TurboQuant(bits, rotation=rotation)
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
    """E⟨q, x̂⟩ = (1 − MSE)·⟨q, x⟩ for a codebook of cell means, averaged over rotations."""
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
    """With rotation a channel of fifty times the size does not raise the relative error; without
    it, it does."""
    x = torch.randn(1, 2, 512, 64, generator=torch.Generator().manual_seed(0))
    x[..., 3] *= 50
    codec = TurboQuant(4)
    error = (codec.decode(codec.encode(x), 64) - x).square().sum(-1) / x.square().sum(-1)
    assert float(error.mean()) == pytest.approx(ERRORS[64][3], rel=0.25)


def inner_products(codec: TurboQuant, x: torch.Tensor, q: torch.Tensor, seeds: int) -> torch.Tensor:
    """Return ⟨q, x̂⟩ − ⟨q, x⟩ of unit vectors for rotations and sketches of `seeds` seeds: [seeds,
    tokens]."""
    out = []
    for seed in range(seeds):
        one = dataclasses.replace(codec, seed=seed)
        out.append(((one.decode(one.encode(x), x.shape[-1]) - x) * q).sum(-1).flatten())
    return torch.stack(out)


@pytest.fixture(scope="module")
def unit_vectors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return unit vectors and queries with inner product one half, [1, 1, 128, 64]."""
    generator = torch.Generator().manual_seed(3)
    x = torch.nn.functional.normalize(torch.randn(1, 1, 128, 64, generator=generator), dim=-1)
    other = torch.randn(1, 1, 128, 64, generator=generator)
    other = torch.nn.functional.normalize(other - (other * x).sum(-1, keepdim=True) * x, dim=-1)
    return x, 0.5 * x + math.sqrt(0.75) * other


@pytest.mark.parametrize(("bits", "orthogonal"), [(1, True), (2, True), (3, False), (3, True)])
def test_prod_is_unbiased(unit_vectors, bits, orthogonal):
    """Theorem 2, averaged over rotations and sketches. A factor √(π/2) instead of the exact one
    would fail at 1 bit."""
    x, q = unit_vectors
    errors = inner_products(TurboQuant(bits, "prod", orthogonal=orthogonal), x, q, 100)
    assert abs(float(errors.mean())) < 4 * float(errors.std()) / math.sqrt(errors.numel())


def test_mse_is_biased_by_its_error_and_prod_is_not(unit_vectors):
    x, q = unit_vectors
    mse, prod = (inner_products(TurboQuant(2, variant), x, q, 100) for variant in ("mse", "prod"))
    assert float(mse.mean()) == pytest.approx(-0.5 * ERRORS[64][1], abs=0.006)
    assert abs(float(prod.mean())) < 0.006


def test_variances_at_three_bits(unit_vectors):
    """D times the variance of an inner product, for a query independent of the vector.

    It is .182 with a Gaussian sketch, .066 with an orthogonal one, and .034 for mse alone.
    """
    x, _ = unit_vectors
    q = torch.nn.functional.normalize(torch.randn(x.shape, generator=torch.Generator().manual_seed(9)), dim=-1)
    for codec, expected in [
        (TurboQuant(3, "prod", orthogonal=False), 0.182),
        (TurboQuant(3, "prod"), 0.066),
        (TurboQuant(3), 0.034),
    ]:
        errors = inner_products(codec, x, q, 100)
        assert 64 * float(errors.var()) == pytest.approx(expected, rel=0.06)


def test_prod_at_one_bit_stores_only_the_sketch():
    assert set(TurboQuant(1, "prod").layout(64).planes) == {"signs", "norms"}
    assert TurboQuant(1, "prod").true_bits(64) == 1 + 16 / 64
    assert TurboQuant(3, "prod").true_bits(64) == 3 + 32 / 64


@pytest.mark.parametrize(("bits", "low", "high"), [(2.25, 2, 3), (2.5, 2, 4), (3.5, 3, 5)])
def test_outlier_channels_have_their_own_vector_and_codebook(bits, low, high):
    """A quarter of the channels is separate; each part has the error of its own dimension's
    codebook.

    A codebook scaled by the other dimension would give .1258 instead of .0325 at 3 bits on 32
    channels.
    """
    x = torch.randn(1, 2, 4096, 128, generator=torch.Generator().manual_seed(5))
    outliers = torch.randperm(128, generator=torch.Generator().manual_seed(6))[:32].sort().values
    x[..., outliers] *= 20
    codec = TurboQuant(bits).fit(x)
    assert torch.equal(codec.fitted["channels"][0, 1].long(), outliers)
    assert codec.true_bits(128) == pytest.approx(bits + 32 / 128 + 2 * 32 * 8 / (4096 * 128))
    rest = torch.tensor([c for c in range(128) if c not in outliers.tolist()])
    error = codec.decode(codec.encode(x), 128) - x
    for channels, part_bits in ((outliers, high), (rest, low)):
        density = lm.sphere_coordinate(len(channels))
        expected = lm.mean_squared_error(density, np.array(lm.sphere_table(part_bits, len(channels))))
        part = error[..., channels].square().sum(-1) / x[..., channels].square().sum(-1)
        assert float(part.mean()) == pytest.approx(expected, rel=0.02)


def test_outlier_table_of_32_channels():
    density = lm.sphere_coordinate(32)
    assert lm.mean_squared_error(density, np.array(lm.sphere_table(3, 32))) == pytest.approx(0.0325, rel=0.01)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 0.5}, "bits=0.5 is not allowed; give 1 to 8, or a quarter, half or three quarters more than 1 to 5"),
        ({"bits": 2.3}, "bits=2.3 is not allowed"),
        ({"bits": 7.75}, "bits=7.75 is not allowed"),
        ({"bits": 9}, "bits=9 is not allowed"),
        ({"variant": "ip"}, "variant=ip is not allowed; choose one of mse, prod"),
        ({"variant": "prod", "correct_norm": True}, "would make variant=prod biased"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UserError, match=text):
        TurboQuant(**options)


def test_head_dim_that_has_no_quarter():
    with pytest.raises(
        UserError, match="needs a head dim that is a multiple of 4 and at least 12, got 30; use whole bits"
    ):
        TurboQuant(2.5).layout(30)


def test_pages_share_a_map_of_heads_which_is_not_kept():
    """Making it takes longer than attention to a page, and it is large beside the packed tokens of a short text."""
    x = torch.randn(1, 4, 64, 32, generator=torch.Generator().manual_seed(0))
    codec = TurboQuant(2.5, side="keys").fit(x)
    planes = codec.encode(x)
    first, second = codec.view(planes, 32), codec.view(planes, 32)
    assert first.rotation is second.rotation
    other = dataclasses.replace(codec, seed=1)
    assert not torch.equal(other.view(codec.encode(x), 32).rotation, first.rotation)
    kept = weakref.ref(first.rotation)
    del first, second
    assert kept() is None
