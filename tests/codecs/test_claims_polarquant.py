"""PolarQuant's claims (arXiv 2502.02617), numerically.

- Lemma 2's densities on Gaussians and on rotated real keys, and Lemma 1's variance of their angles;
- independence across levels, and errors at each setting;
- Theorem 1's decrease of the error with bits, and online against offline codebooks.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tersekv.codecs.polarquant import PolarQuant
from tersekv.errors import UserError
from tersekv.layouts.polar import Polar
from tersekv.transforms.polar import from_polar, to_polar
from tersekv.transforms.rotation import random_rotation

LEVELS = 4
CRITICAL = 1.95
"""Value of √n times the Kolmogorov-Smirnov distance that the true distribution exceeds with
probability 0.001."""


def distribution(level: int, angle: np.ndarray) -> np.ndarray:
    """Return Lemma 2's distribution function; levels ≥ 2 by quadrature."""
    if level == 1:
        return angle / (2 * math.pi)
    grid = np.linspace(0, math.pi / 2, 20_001)
    density = np.sin(2 * grid) ** (2 ** (level - 1) - 1)
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return np.interp(angle, grid, mass / mass[-1])


def distance(level: int, angles: Tensor) -> float:
    """Return the Kolmogorov-Smirnov distance of angles to Lemma 2's distribution."""
    sample = np.sort(angles.double().numpy().ravel())
    expected, n = distribution(level, sample), len(sample)
    return max((np.arange(1, n + 1) / n - expected).max(), (expected - np.arange(n) / n).max())


def angles_of(x: Tensor) -> list[Tensor]:
    return to_polar(x.double(), LEVELS)[0]


def relative_error(codec: PolarQuant, x: Tensor) -> Tensor:
    fitted = codec.fit(x)
    return (fitted.decode(fitted.encode(x), x.shape[-1]) - x).square().sum(-1) / x.square().sum(-1)


@pytest.fixture(scope="module")
def gaussians() -> Tensor:
    return torch.randn(1, 4, 4096, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("levels", range(1, 6))
def test_polar_coordinates_are_a_bijection(levels):
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(levels)).double()
    angles, radii = to_polar(x, levels)
    assert [a.shape[-1] for a in angles] == [96 >> level for level in range(1, levels + 1)]
    assert all(a.min() >= 0 and a.max() < (2 * math.pi if i == 0 else math.pi / 2) for i, a in enumerate(angles))
    torch.testing.assert_close(radii, x.unflatten(-1, (-1, 2**levels)).norm(dim=-1))
    torch.testing.assert_close(from_polar([(a.cos(), a.sin()) for a in angles], radii), x)


def test_lemma_2_densities_on_gaussians(gaussians):
    for level, angles in enumerate(angles_of(gaussians[:, :, :1024]), start=1):
        assert distance(level, angles) * math.sqrt(angles.numel()) < CRITICAL


def variance(level: int) -> float:
    """Return the variance of a level's angle: ψ'((d + 1)/2)/8 with d = 2^{ℓ−1}, level 1 folded to [0, π/2].

    The density ∝ sin^{d−1}(2ψ) has the characteristic function Γ((d+1)/2)² / Γ((d+1)/2 ± t/4), times a phase.
    """
    return float(torch.polygamma(1, torch.tensor((2 ** (level - 1) + 1) / 2, dtype=torch.float64))) / 8


@pytest.mark.parametrize("level", range(1, 8))
def test_variance_of_angles_by_integration(level):
    """The closed form is Lemma 2's density integrated, and lies between 1/(4(d + 1)) and 1/(4d)."""
    angle = np.linspace(0, math.pi / 2, 100_001)
    density = np.sin(2 * angle) ** (2 ** (level - 1) - 1)
    second = float(((angle - math.pi / 4) ** 2 * density).sum() / density.sum())
    assert variance(level) == pytest.approx(second, rel=1e-4)
    d = 2 ** (level - 1)
    assert 1 / (4 * (d + 1)) < variance(level) < 1 / (4 * d)


def test_variance_of_angles_on_gaussians(gaussians):
    """Seven levels of D = 128: mean π/4 and the closed form's variance, within 4 standard errors."""
    angles, _ = to_polar(gaussians.double(), 7)
    for level, found in enumerate(angles, start=1):
        angle = (found % (math.pi / 2) if level == 1 else found).flatten() - math.pi / 4
        assert abs(float(angle.mean())) < 4 * math.sqrt(variance(level) / len(angle))
        squares = angle.square()
        assert abs(float(squares.mean()) - variance(level)) < 4 * float(squares.std()) / math.sqrt(len(angle))


def test_variance_of_angles_falls_like_one_over_d():
    """Each level divides the variance by 1.76 to 2, towards 2, so it is of the order 1/d, not 1/√d."""
    ratios = [variance(level) / variance(level + 1) for level in range(1, 12)]
    assert ratios == sorted(ratios)
    assert 1.7 < ratios[0] < 1.8
    assert 1.998 < ratios[-1] < 2
    found = [variance(level) for level in range(1, 8)]
    assert found == pytest.approx([0.2056, 0.1169, 0.0613, 0.0311, 0.0156, 0.0078, 0.0039], abs=5e-5)


def test_the_distance_detects_a_wrong_density(gaussians):
    """Level 3's angles against level 2's density: the test above can fail."""
    angles = angles_of(gaussians[:, :, :1024])[2]
    assert distance(2, angles) * math.sqrt(angles.numel()) > 10 * CRITICAL


def test_lemma_2_densities_on_rotated_real_keys(real_keys):
    """Keys of all layers and heads, each with its own rotation. The angles of any vector follow
    Lemma 2."""
    keys = real_keys[::3, :, ::37].reshape(-1, real_keys.shape[-1])
    rotated = torch.stack([k.double() @ random_rotation(len(k), s).double().T for s, k in enumerate(keys)])
    for level, angles in enumerate(angles_of(rotated), start=1):
        assert distance(level, angles) * math.sqrt(angles.numel()) < CRITICAL


def test_one_rotation_brings_all_real_keys_close_to_lemma_2(real_keys):
    """With one rotation for all layers and heads the densities hold on average over what heads
    share.

    Without rotation they do not, less so at higher levels.
    """
    D = real_keys.shape[-1]
    plain, rotated = angles_of(real_keys), angles_of(real_keys.double() @ random_rotation(D, 0).double().T)
    for level in (3, 4):
        assert distance(level, rotated[level - 1]) < 0.05 < distance(level, plain[level - 1]) / 1.5


def test_angles_of_levels_are_independent(gaussians):
    """Neither angles nor their distances from the middle are correlated between parent and child."""
    angles = angles_of(gaussians)
    middles = [math.pi] + [math.pi / 4] * 3
    for a, b in itertools.combinations(range(LEVELS), 2):
        parent = angles[b].repeat_interleave(2 ** (b - a), dim=-1).flatten() - middles[b]
        child = angles[a].flatten() - middles[a]
        for pair in ((child, parent), (child.abs(), parent.abs()), (child, parent.abs()), (child.abs(), parent)):
            # one child per parent, so that the samples are independent
            sample = torch.stack([p[:: 2 ** (b - a)] for p in pair])
            assert abs(torch.corrcoef(sample)[0, 1]) * math.sqrt(sample.shape[1]) < 4


@pytest.mark.parametrize(
    ("bits", "expected", "true_bits"),
    [
        ("4-2-2-2", 0.0320, 3.875),
        ("4-3-2-2", 0.0249, 4.125),
        ("4-3-3-3", 0.0181, 4.3125),
        ("5-3-2-2", 0.0153, 4.625),
        ("3-2-2-2", 0.0699, 3.375),
        ("2-2-2-2", 0.217, 2.875),
        # the full recursion (Algorithm 1), one radius per vector
        ("3-3-3-3-3-3-3", 0.0571, 3.125),
        ("4-2-2-2-2-2-2", 0.0351, 3.125),
        ("4-3-2-2-2-2-2", 0.0280, 3.375),
        ("4-3-3-3-3-3-3", 0.0190, 3.625),
    ],
)
@pytest.mark.parametrize("rotation", ["qr", "hadamard", "none"])
def test_relative_error_to_three_digits(gaussians, bits, expected, true_bits, rotation):
    codec = PolarQuant(bits, rotation)
    error = relative_error(codec, gaussians)
    digits = 10 ** math.floor(math.log10(expected)) * 0.005  # half of the third digit
    assert float(error.mean()) == pytest.approx(
        expected, abs=digits + 3 * float(error.std()) / math.sqrt(error.numel())
    )
    assert codec.true_bits(128) == true_bits


def test_error_falls_with_bits_as_theorem_1_says(gaussians):
    """An error of ε costs O(log 1/ε) bits.

    Each further bit for every angle, 15/16 bit per channel, divides the error by almost 4.
    """
    errors = [float(relative_error(PolarQuant(f"{b + 2}-{b}-{b}-{b}"), gaussians).mean()) for b in range(1, 6)]
    ratios = [a / b for a, b in itertools.pairwise(errors)]
    assert all(3.5 < ratio < 4 for ratio in ratios)
    assert ratios == sorted(ratios)  # towards 4, the limit of fine codebooks


def test_online_tables_find_the_offline_ones_on_gaussians(gaussians):
    online = PolarQuant(codebook="online").fit(gaussians)
    for level, table in enumerate(PolarQuant()._level_tables("cpu")[1:], start=2):
        torch.testing.assert_close(online.fitted[f"level {level}"][0], table, atol=0.02, rtol=0)
    error = float(relative_error(online, gaussians).mean())
    assert error == pytest.approx(0.0320, rel=0.02)


def test_online_tables_beat_offline_ones_on_real_keys(real_keys):
    """Online codebooks are much better without rotation, where angles have other densities, and
    slightly with it."""
    x = real_keys[15][None]
    for rotation, factor in (("none", 0.8), ("qr", 1.0)):
        offline, online = (
            float(relative_error(PolarQuant(rotation=rotation, codebook=codebook), x).mean())
            for codebook in ("offline", "online")
        )
        assert online < factor * offline


def test_level_1_is_a_circle():
    """An angle just below 2π gets an entry near 0 if that is nearer than the last one."""
    x = torch.zeros(1, 1, 32, 16)
    x[..., 0], x[..., 1] = 1.0, -0.05
    codec = PolarQuant(rotation="none", codebook="online")
    table = torch.linspace(0.1, 5.8, 16)[None]
    fitted = dict(codec.fit(x).fitted) | {"level 1": table}
    codec = PolarQuant(rotation="none", codebook="online", fitted=fitted)
    codes = Polar((4, 2, 2, 2), 16).unpack(codec.encode(x)["angles"], 0)
    assert codes[0, 0, 0, 0].tolist() == [0] * 32


def test_lengths_are_kept():
    """A block of 2^L channels decodes to its stored radius, up to float16 rounding."""
    x = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(1))
    codec = PolarQuant("1-1-1-1")
    ratio = codec.decode(codec.encode(x), 64).norm(dim=-1) / x.norm(dim=-1)
    assert (ratio - 1).abs().max() < 2**-10


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": "4,2"}, "give 1 to 8 bits for each level, from the first on, joined by '-'"),
        ({"bits": "4-9"}, "bits=4-9 is not allowed"),
        ({"bits": ""}, "is not allowed"),
        ({"rotation": "haar"}, "rotation=haar is not allowed; choose one of qr, hadamard, none"),
        ({"codebook": "prompt"}, "choose one of offline, online"),
        ({"radii": "fp8"}, "radii=fp8 is not allowed"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UserError, match=text):
        PolarQuant(**options)


def test_head_dim_that_levels_do_not_divide():
    with pytest.raises(UserError, match="2\\^5 does not divide the head dim 80; give bits for at most 4 levels"):
        PolarQuant("4-2-2-2-2").layout(80)


def test_radius_that_float16_cannot_hold():
    x = torch.full((1, 1, 32, 64), 3e5)
    with pytest.raises(UserError, match=r"a radius of .* use radii=bf16"):
        PolarQuant().encode(x)
    assert relative_error(PolarQuant(radii="bf16"), x).max() < 0.1


def test_online_tables_of_nearly_equal_tokens():
    """A repeated token with rounding noise is coded as well as with offline codebooks."""
    generator = torch.Generator().manual_seed(48)
    noise = torch.randn(2, 3, 32, 64, generator=generator)
    x = noise[:, :, :1] * (1 + 1e-7 * torch.randint(-2, 3, noise.shape, generator=generator))
    for rotation in ("qr", "none"):
        assert relative_error(PolarQuant("8-8", rotation, "online"), x).max() < 1e-3


def test_short_tokens_are_coded():
    """Other tokens are still coded, if less finely, when one token is very long."""
    x = 1e-4 * torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    x[:, :, 5] *= 1e6
    assert relative_error(PolarQuant("8-8", "qr", "online", radii="bf16"), x).mean() < 0.02
