"""Attention over arbitrary polar coordinates: any codes, radii and codebooks, with and without
integer products."""

import math

import pytest
import torch

from native_calls import ROUNDING_ISAS
from packed_views import make_mask, tokens
from tersekv.codecs import methods
from tersekv.kernels.attend_packed import attend_packed as reference
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.layouts.exact import ExactView
from tersekv.layouts.polar import Polar, PolarView
from test_ops_parity import isa, one_thread, poisoned_outputs, pytestmark  # noqa: F401
from test_ops_trellis_attend import check

INTEGERS = 4e-4
"""Error of 16-bit queries, weights and coordinates per row of queries, relative to the largest
norm."""


def polar_view(B=1, H=2, T=96, D=64, dtype=torch.float16, radii=None, bits=(4, 2, 2, 2), online=False):
    """Return a view of random codes and radii between 0.1 and 1.1, in tensors larger than the view."""
    polar, N = Polar(bits, D, dtype), T // 32
    planes = {}
    for name, spec in polar.layout().planes.items():
        full = torch.full((B, H + 1, N + 2, *spec.shape), -1 if name == "angles" else float("nan")).to(spec.dtype)
        planes[name] = full[:, :H, :N]
    planes["angles"].random_(0, 256)
    planes["radii"].copy_(torch.rand(planes["radii"].shape) + 0.1 if radii is None else radii)
    shape = (B,) if online else ()
    spans = [2 * math.pi, *[math.pi / 2] * (len(bits) - 1)]
    tables = [span * torch.rand(*shape, 2**b) for b, span in zip(bits, spans, strict=True)]
    return PolarView(polar, planes, tables)


def close(x, expected):
    """Compare row by row, so that a large row does not hide another's error."""
    error, size = ((y.double().norm(dim=-1)) for y in (x - expected, expected))
    assert (error <= INTEGERS * size + 1e-6).all(), float((error / size).nan_to_num().max())


def run(keys, values, R=3, mask=None, scaling=None, softcap=None, query=None):
    D = keys.decode().shape[-1]
    query = torch.randn(*values.decode().shape[:2], R, D) if query is None else query
    return check(query, keys, values, mask, scaling or D**-0.5, softcap, close)


SIZES = [(1, 1, 32, 16, 1), (2, 3, 192, 128, 4), (1, 2, 1088, 80, 5), (3, 1, 544, 96, 8), (1, 2, 64, 256, 7),
         (2, 2, 96, 48, 6)]  # fmt: skip


@pytest.mark.parametrize("online", [False, True], ids=["tables for all", "tables per row"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(isa, size, dtype, online):  # noqa: F811
    B, H, T, D, R = size
    torch.manual_seed(T)
    keys, values = (polar_view(B, H, T, D, dtype, online=online) for _ in range(2))
    run(keys, values, R, None if R % 2 else make_mask(B, R // 2, T), softcap=20.0 if R == 5 else None)


@pytest.mark.parametrize("bits", [(4, 2, 2), (4, 2, 2, 3), (3, 2, 2, 2), (4, 2, 2, 2, 2, 2)], ids=str)
def test_other_bits(isa, bits):  # noqa: F811
    torch.manual_seed(0)
    run(polar_view(bits=bits), polar_view(bits=bits))


@pytest.mark.parametrize("code", [0, 255])
def test_one_direction(isa, code):  # noqa: F811
    """A whole radius in one channel: the largest possible coordinate and sum over tokens."""
    torch.manual_seed(code)
    for channel in (0, 1, 15):
        views = polar_view(T=1024, D=32), polar_view(T=1024, D=32)
        for view in views:
            view.angles.fill_(code)
            for level, table in enumerate(view.tables):
                table.fill_(math.pi / 2 * (channel >> level & 1))
        run(*views, R=4)


def test_radii_of_any_size(isa):  # noqa: F811
    """Radii that differ within a token and between tokens, and zero radii. Small ones count where
    they are alone."""
    torch.manual_seed(1)
    shape = (1, 2, 8, 4, 32)
    radii = {
        "within tokens": 10 ** (6 * torch.rand(shape) - 5),
        "between tokens": (10 ** (6 * torch.rand(1, 2, 8, 1, 32) - 5)).expand(shape),
        "some zero": torch.rand(shape) * (torch.rand(1, 2, 8, 1, 32) < 0.5),
        "zero": torch.zeros(shape),
        "large": torch.full(shape, 60000.0),
        "subnormal": torch.full(shape, 3e-7),
    }
    for of_keys in radii.values():
        for of_values in radii.values():
            views = [polar_view(T=256, radii=x) for x in (of_keys, of_values)]
            largest = float(of_keys.max()) * 4 or 1.0
            run(*views, scaling=0.1 / largest)


def test_many_small_weights_count(isa):  # noqa: F811
    """One token outweighs each other one by 10^5, but not their sum: rounding must not lose the
    others."""
    T = 512
    torch.manual_seed(2)
    values = polar_view(H=1, T=T)
    values.angles.copy_(values.angles[:, :, :1, :, :1])
    values.angles[0, 0, 0, :, 0].random_(0, 256)
    key = torch.zeros(1, 1, T, 64)
    key[0, 0, 0, 0] = math.log(1e5)
    query = torch.zeros(1, 1, 1, 64)
    query[..., 0] = 1.0
    view = ExactView({"x": key.unflatten(2, (-1, 32))})
    run(view, values, query=query, scaling=1.0)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 30.0, 1e18])
def test_queries_of_any_size(isa, size):  # noqa: F811
    torch.manual_seed(3)
    query = torch.randn(1, 2, 4, 64) * size
    query[0, 0, 1, 7] *= 1000  # one channel above all others
    query[0, 1, 2] = 0
    run(polar_view(), polar_view(), query=query, scaling=1 / size / 100)


def test_masked_rows_and_padding(isa):  # noqa: F811
    torch.manual_seed(4)
    mask = torch.zeros(1, 3, 96, dtype=torch.bool)
    mask[0, 1, 95] = True
    mask[0, 2, :32] = True
    _, (out, lse) = run(polar_view(), polar_view(), mask=mask)
    assert torch.equal(out[:, :, 0], torch.zeros(1, 2, 64))
    assert (lse[:, :, 0] == -math.inf).all()


def test_nan_stays_visible(isa):  # noqa: F811
    torch.manual_seed(5)
    keys, values = polar_view(), polar_view()
    for wrong in (float("nan"), float("inf")):
        query = torch.randn(1, 2, 3, 64)
        query[0, 1, 2, 5] = wrong
        out, _ = cpu_attend.attend_packed(query, keys, values, None, 0.01, None)
        assert out[0, 1, 2].isnan().any()
        assert out[0, 0].isfinite().all()
        assert out[0, 1, :2].isfinite().all()
    values.radii[0, 0, 1, 2, 3] = float("nan")
    out, _ = cpu_attend.attend_packed(torch.randn(1, 2, 3, 64), keys, values, None, 0.01, None)
    assert out[0, 0, :, 32:48].isnan().all()
    assert out[0, 1].isfinite().all()
    keys.radii[0, 1, 1, 2, 3] = float("nan")
    out, lse = cpu_attend.attend_packed(torch.randn(1, 2, 3, 64), keys, values, None, 0.01, None)
    assert lse[0, 1].isnan().all()
    assert lse[0, 0].isfinite().all()


def test_tables_that_are_not_finite(isa):  # noqa: F811
    torch.manual_seed(6)
    keys, values = polar_view(online=True), polar_view(B=1)
    keys.tables[0][:, 3] = float("nan")
    _, lse = cpu_attend.attend_packed(torch.randn(1, 2, 3, 64), keys, values, None, 0.01, None)
    assert lse.isnan().all()


def test_combined_with_other_views(isa):  # noqa: F811
    """One side is polar and the other exact, so all errors come from the polar side."""
    torch.manual_seed(7)
    exact = ExactView({"x": torch.randn(1, 2, 3, 32, 64)})
    run(polar_view(), exact)
    run(exact, polar_view(), R=6)


def test_many_threads_agree(isa):  # noqa: F811
    torch.manual_seed(8)
    args, (out, lse) = run(polar_view(B=2, T=2048), polar_view(B=2, T=2048))
    torch.set_num_threads(3)
    again = cpu_attend.attend_packed(*args)
    torch.testing.assert_close(again[0], out, rtol=0, atol=2e-4 * float(out.abs().max()))
    torch.testing.assert_close(again[1], lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"codebook": "online", "radii": "bf16", "rotation": "none"}], ids=str)
def test_vectors_with_outliers(isa, options):  # noqa: F811
    """Within 1e-3 of float32 attention over the decoded cache, with outlier channels and tokens."""
    torch.manual_seed(9)
    codecs = methods()["polarquant"].build(**options)
    x = tokens(1, 2, 2048, 128)
    keys, values = (c.fit(x).view(c.fit(x).encode(x), 128).inner for c in (codecs.keys, codecs.values))
    query = 0.3 * x[:, :, :12] + torch.randn(1, 2, 12, 128)
    args = query, keys.operand, values.operand, None, 128**-0.5, None
    out, expected = cpu_attend.attend_packed(*args)[0], reference.reference(*args)[0]
    assert (out - expected).norm() <= (1e-3 if isa in ROUNDING_ISAS else 1e-5) * expected.norm()
