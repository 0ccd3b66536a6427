"""The kernels decode packed tokens to what torch decodes, for every layout and both sides."""

from __future__ import annotations

import pytest
import torch

from packed_views import FORMATS, packed, rope, roped, tokens
from tersekv.kernels import backends
from tersekv.kernels.attend_packed import decoded
from tersekv.layouts.mean_removed import MeanRemoved, RotatedMean
from tersekv.layouts.roped import Roped
from test_ops_parity import isa, pytestmark  # noqa: F401

ROUNDING = 2e-6
"""Bound of float32's error, relative to the largest channel: sums of at most a sketch's length."""


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(2, 3, 192, 64), (1, 2, 1088, 96)], ids=str)
def test_layouts(isa, shape, name, side):  # noqa: F811
    torch.manual_seed(0)
    operand = packed(name, side, tokens(*shape)).inner.operand
    wanted = decoded(operand)
    if isinstance(operand, torch.Tensor):
        return
    found = backends.decode.direct(operand, torch.float32)
    assert found is not None
    assert found.dtype == torch.float32
    bound = ROUNDING * float(wanted.abs().max())
    torch.testing.assert_close(found.expand_as(wanted), wanted, rtol=0, atol=bound)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = backends.decode(operand, dtype)
        assert rounded.dtype == dtype
        assert torch.equal(rounded, found.to(dtype))


@pytest.mark.parametrize("rows", ["shared", "per row", "per head"])
@pytest.mark.parametrize("name", ["grid", "sparse", "signs", "polar", "joined"])
def test_keys_before_rope(isa, name, rows):  # noqa: F811
    torch.manual_seed(0)
    view = roped(packed(name, "keys", tokens(2, 3, 192, 64)), "halves", 64, 192, rows)
    found, wanted = backends.decode.direct(view.operand, torch.float32), view.decode()
    assert found is not None
    torch.testing.assert_close(found.expand_as(wanted), wanted, rtol=0, atol=2 * ROUNDING * float(wanted.abs().max()))
    assert torch.equal(view.floats(torch.bfloat16), found.bfloat16())


@pytest.mark.parametrize("name", ["grid", "trellis"])
def test_maps_means_and_rope_are_applied(name):
    """`floats` of a composed view is its `decode`, in the wanted type."""
    torch.manual_seed(0)
    x = tokens(2, 3, 64, 64)
    inner, model = packed(name, "keys", x), rope("halves", 64)
    angles = model.angles_at(torch.arange(5, 69))
    mean = RotatedMean(torch.randn(1, 3, 64), model, angles)
    for view in (inner, Roped(inner, model, angles), MeanRemoved(inner, mean)):
        wanted = view.decode()
        torch.testing.assert_close(view.floats(torch.float32), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(view.floats(torch.bfloat16).float(), wanted, rtol=1e-2, atol=1e-2)
