"""QJL's estimator (arXiv 2406.03482, Lemmas 3.2 and 3.5): mean, standard deviation, and edge cases."""

from __future__ import annotations

import math

import pytest
import torch

from tersekv.codecs.qjl import Qjl
from tersekv.codecs.transforms.sketch import jl_sketch, sign_factor
from tersekv.layouts.signs import pack_signs, unpack_signs

# Standard deviation of the estimate of a cosine of 0.5 between unit vectors, D = 128: rows M ->
# (orthogonal, i.i.d.)
SPREAD = {64: (0.118, 0.144), 128: (0.0589, 0.1013), 256: (0.0419, 0.0716), 512: (0.0296, 0.0509)}


def estimates(M: int, D: int, orthogonal: bool, trials: int, cosine: float = 0.5) -> torch.Tensor:
    """Estimate ⟨q, k⟩ = cosine for unit vectors, over independent sketches, through packed bytes."""
    q, k = torch.zeros(D), torch.zeros(D)
    q[0] = 1
    k[0], k[1] = cosine, math.sqrt(1 - cosine**2)
    found = []
    for seed in range(trials):
        codec = Qjl(sketch=M, outliers=0, orthogonal=orthogonal, seed=seed)
        planes = codec.encode(k.expand(1, 1, 32, D))
        found.append(codec.view(planes, D).scores(q.reshape(1, 1, 1, D))[0, 0, 0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("M", SPREAD)
@pytest.mark.parametrize("orthogonal", [True, False])
def test_mean_and_spread(M, orthogonal):
    """Mean and standard deviation agree with the design's values within 4 of their standard errors."""
    trials = 200
    x = estimates(M, 128, orthogonal, trials)
    expected = SPREAD[M][0 if orthogonal else 1]
    assert abs(float(x.mean()) - 0.5) < 4 * expected / math.sqrt(trials)
    assert abs(float(x.std()) / expected - 1) < 4 / math.sqrt(2 * trials)


def test_spread_theory_per_row():
    """sd·√M at cosine c: √(π/2 − c²) = 1.15 for i.i.d. and √((π/2 − 1)(1 − c²)) = 0.65 for
    orthogonal rows.

    The design measured 0.67 for the latter, which holds for M = D.
    """
    trials, D = 300, 64
    iid = estimates(D, D, False, trials).std() * math.sqrt(D)
    orthogonal = estimates(D, D, True, trials).std() * math.sqrt(D)
    assert float(iid) == pytest.approx(math.sqrt(math.pi / 2 - 0.25), rel=4 / math.sqrt(2 * trials))
    assert float(orthogonal) == pytest.approx(0.67, rel=4 / math.sqrt(2 * trials))


@pytest.mark.parametrize(("D", "bias"), [(128, 0.0020), (64, 0.0039), (32, 0.0078)])
def test_exact_factor_of_orthogonal_rows(D, bias):
    """√(π/2) overestimates by 0.20 / 0.39 / 0.78 %, and the exact factor is smaller by that."""
    assert math.sqrt(math.pi / 2) / sign_factor(D) - 1 == pytest.approx(bias, abs=5e-5)
    u = torch.randn(200_000, D, generator=torch.Generator().manual_seed(D))
    u = (u / u.norm(dim=-1, keepdim=True))[:, 0].abs()
    measured = 1 / (math.sqrt(D) * float(u.mean()))
    assert sign_factor(D) == pytest.approx(measured, rel=4 * float(u.std() / u.mean()) / math.sqrt(200_000))


@pytest.mark.parametrize(("M", "D"), [(64, 64), (100, 64), (200, 64), (40, 64), (1, 64), (512, 128), (33, 96)])
def test_sketch_rows_are_orthogonal_in_blocks(M, D):
    S = jl_sketch(M, D, seed=3).double()
    assert S.shape == (M, D)
    for start in range(0, M, D):
        block = S[start : start + D]
        torch.testing.assert_close(block @ block.T, D * torch.eye(len(block), dtype=torch.float64), atol=1e-4, rtol=0)
    assert torch.equal(jl_sketch(M, D, seed=3), jl_sketch(M, D, seed=3))
    assert not torch.equal(jl_sketch(M, D, seed=3), jl_sketch(M, D, seed=4))


@pytest.mark.parametrize("M", [1, 40, 129])
@pytest.mark.parametrize("outliers", [0, 8])
@pytest.mark.parametrize("outliers_per", ["prompt", "group"])
def test_odd_sketch_sizes_stay_unbiased(M, outliers, outliers_per):
    """Averaged over sketches, the decoded key is the key, with and without outlier channels."""
    D, trials = 32, 100
    k = torch.randn(1, 1, 32, D, generator=torch.Generator().manual_seed(1))
    k[..., 5] += 20
    total = torch.zeros_like(k)
    for seed in range(trials):
        codec = Qjl(M, outliers, 64, outliers_per, seed=seed).fit(k)
        total += codec.decode(codec.encode(k), D)
    norm = k.norm(dim=-1, keepdim=True)
    error = (total / trials - k).square().mean().sqrt() / norm.mean()
    # Per component the sd of one estimate is at most √(π/2)·‖k‖/√M; that of the mean is smaller by
    # √trials.
    assert float(error) < 1.3 * math.sqrt(math.pi / 2) / math.sqrt(M * trials)


def test_outlier_channels_are_the_largest_per_head():
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for head in range(3):
        x[:, head, :, [head, 10 + head]] *= 30
    codec = Qjl(outliers=2).fit(x)
    assert codec.fitted["channels"].tolist() == [[[h, 10 + h] for h in range(3)]] * 2


def test_outlier_sketch_lowers_the_error():
    x = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(0))
    x[..., 7] *= 12
    q = torch.randn(1, 2, 16, 64, generator=torch.Generator().manual_seed(1))

    def error(codec: Qjl) -> float:
        codec = codec.fit(x)
        return float((codec.view(codec.encode(x), 64).scores(q) - q @ x.transpose(-1, -2)).square().mean())

    plain = error(Qjl(sketch=256, outliers=0))
    assert error(Qjl(sketch=128, outliers=8, outlier_sketch=128)) < 0.75 * plain


def test_sign_of_zero_and_zero_vectors():
    """sign(0) is +1, and a zero vector's norm makes its estimate exactly 0."""
    assert pack_signs(torch.tensor([0.0, -0.0, -1.0, 1.0])).tolist() == [0b1011]
    x = torch.zeros(1, 1, 32, 64)
    for codec in (Qjl(), Qjl(outliers=0), Qjl(outliers_per="group")):
        codec = codec.fit(x)
        planes = codec.encode(x)
        assert codec.decode(planes, 64).abs().max() == 0
        assert codec.view(planes, 64).scores(torch.randn(1, 1, 3, 64)).abs().max() == 0


def test_sign_bits_lie_as_drawn():
    """Least significant bit first, bytes in order, unused bits 0."""
    signs = torch.tensor([1.0, -1, -1, 1, 1, 1, -1, -1, -1, 1])
    packed = pack_signs(signs)
    assert packed.tolist() == [0b00111001, 0b00000010]
    assert unpack_signs(packed, 10).tolist() == signs.tolist()


def test_norms_do_not_overflow_float16():
    x = torch.full((1, 1, 32, 256), 3e4)
    codec = Qjl(outliers=0)
    decoded = codec.decode(codec.encode(x), 256)
    assert torch.isfinite(decoded).all()
