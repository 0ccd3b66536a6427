"""Triton's polar codes equal the torch reference's, except for angles equally near to two entries."""

from __future__ import annotations

import math

import pytest
import torch

from tersekv.codecs.polarquant import offline_table
from tersekv.kernels import backends, encode_polar
from tersekv.kernels.triton import encode
from tersekv.layouts.polar import Polar
from test_ops_triton import device, pytestmark, right  # noqa: F401
from test_ops_triton_encode import on, poisoned  # noqa: F401

NEAR = 2e-6
"""Angle in radians below float32's precision: twice the rounding error of angles up to 2π and of a
seam."""


def distance(angle, codes, table, circular):
    """Return the distance of angles, float64 [B, ...], from their entries of a codebook [n] or [B,
    n]."""
    rows = table.double() if table.dim() == 2 else table.double().expand(len(angle), -1)
    entries = rows.gather(1, codes.flatten(1).long()).view(angle.shape)
    apart = (angle - entries).abs()
    return torch.minimum(apart, 2 * math.pi - apart) if circular else apart


def compare(result, expected, x, level_bits, tables):
    """Check that codes are as near as the reference's and nearly all equal; radii may differ in the
    last bit."""
    (angles, radii), (right, right_radii) = (tuple(t.cpu() for t in pair) for pair in (result, expected))
    assert angles.shape == right.shape
    torch.testing.assert_close(radii, right_radii, rtol=1.2e-7 * len(level_bits), atol=0)
    polar = Polar(tuple(level_bits), x.shape[-1])
    exact = encode_polar.to_polar(x.double(), len(level_bits))[0]
    for level, (angle, table) in enumerate(zip(exact, tables, strict=True)):
        one, other = (polar.unpack(plane, level) for plane in (angles, right))
        angle = angle.transpose(-1, -2)
        far = distance(angle, one, table, level == 0) - distance(angle, other, table, level == 0)
        assert float(far.max()) <= NEAR
        assert (one != other).float().mean() <= 1e-3
    unused = 8 * angles.shape[-2] - encode_polar.stream_offsets(level_bits, x.shape[-1])[-1]
    assert bool((angles[..., -1, :] >> (8 - unused) == 0).all()) if unused else True


def fitted(level, bits, rows):
    """Return codebooks of each row as k-means might give them: uneven, with level 1's seam
    anywhere."""
    span = 2 * math.pi if level == 1 else math.pi / 2
    return (torch.rand(rows, 2**bits).cumsum(1) + 0.1).mul(1 / (2**bits * 0.8)).clamp(max=1).mul(span * 0.98)


CASES = [([4, 2, 2, 2], 64), ([4, 2, 2, 2], 80), ([5, 3, 2], 96), ([3], 6), ([8, 1], 64), ([1, 1, 1, 7], 48)]


@pytest.mark.parametrize("online", [False, True], ids=["offline", "tables per row"])
@pytest.mark.parametrize(("level_bits", "D"), CASES, ids=str)
def test_random_vectors(device, level_bits, D, online):  # noqa: F811
    torch.manual_seed(D)
    x = torch.randn(2, 1, 32, D).mT.contiguous().mT
    tables = [
        fitted(level, bits, 2).sort(-1).values if online else offline_table(bits, level, "cpu")
        for level, bits in enumerate(level_bits, start=1)
    ]
    call = x, level_bits, tables
    result = backends.encode_polar(x.to(device), level_bits, on(device, *tables))
    compare(result, right(encode_polar.encode_polar, *call), *call)


@pytest.mark.parametrize("level_bits", [[4, 2], [2, 3]], ids=str)
def test_every_direction(device, level_bits):  # noqa: F811
    """All directions, boundaries and axes included, with lengths that span nine decades."""
    angle = torch.arange(512, dtype=torch.float64) * 2 * math.pi / 512
    pairs = torch.stack([angle.cos(), angle.sin()], -1) * 10.0 ** (torch.arange(512) % 10 - 5)[:, None]
    x = pairs.float().view(1, 1, 32, 32)
    tables = [offline_table(bits, level, "cpu") + 0.01 for level, bits in enumerate(level_bits, start=1)]
    result = backends.encode_polar(x.to(device), level_bits, on(device, *tables))
    expected = right(encode_polar.encode_polar, x, level_bits, tables)
    torch.testing.assert_close(result[1].cpu(), expected[1], rtol=3e-7, atol=0)
    polar, exact = Polar(tuple(level_bits), 32), encode_polar.to_polar(x.double(), 2)[0]
    for level, table in enumerate(tables):
        codes = polar.unpack(result[0].cpu(), level)
        apart = (exact[level].transpose(-1, -2).unsqueeze(-1) - table.double()).abs()
        apart = torch.minimum(apart, 2 * math.pi - apart) if level == 0 else apart
        taken = apart.gather(-1, codes.long().unsqueeze(-1))[..., 0]
        assert float((taken - apart.amin(-1)).max()) <= NEAR


def test_zero_has_no_radius(device):  # noqa: F811
    tables = [offline_table(2, level, "cpu") for level in (1, 2)]
    angles, radii = backends.encode_polar(torch.zeros(1, 2, 32, 16, device=device), [2, 2], on(device, *tables))
    assert angles.shape == (1, 2, 3, 32)
    assert torch.equal(radii.cpu(), torch.zeros(1, 2, 4, 32))


@pytest.mark.parametrize("options", [{}, {"codebook": "online"}], ids=str)
def test_a_codec_decodes_to_the_same(device, options):  # noqa: F811
    from tersekv.codecs import methods

    torch.manual_seed(3)
    x = torch.randn(1, 2, 64, 64)
    with backends.forced("auto"):
        codec = methods()["polarquant"].build(**options).keys.fit(x)
        expected = codec.view(codec.encode(x), 64).decode()
    codec = codec.to(device)
    decoded = codec.view(codec.encode(x.to(device)), 64).decode()
    torch.testing.assert_close(decoded.cpu(), expected, rtol=0, atol=2e-3)


def test_why_not(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    table = torch.zeros(4)
    assert encode.why_not_encode_polar(torch.zeros(1, 32, 8), [2], [table]) is None
    assert "a table is torch.float64" in str(encode.why_not_encode_polar(torch.zeros(1, 32, 8), [2], [table.double()]))
