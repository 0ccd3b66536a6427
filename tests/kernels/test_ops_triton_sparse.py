"""Triton kernels for outliers give the same thresholds and entries as the torch reference.

Without a GPU they run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from tersekv.kernels import backends, encode_sparse
from tersekv.kernels.triton import encode as kernels
from test_ops_triton import device, pytestmark, right  # noqa: F401
from test_ops_triton_encode import on, poisoned, same  # noqa: F401


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("n", [1, 7, 64, 100])
def test_quantiles(device, n, share):  # noqa: F811
    torch.manual_seed(n)
    vectors = torch.randn(n, 2, 3).permute(1, 2, 0) * 10
    vectors[0, 1] = vectors[0, 1].round()  # some that are equal
    same(backends.quantiles(*on(device, vectors, share)), right(encode_sparse.quantiles, vectors, share))


def test_quantiles_beside_infinities(device):  # noqa: F811
    vectors = torch.tensor([[float("inf"), -1.0, 2.0, 3.0], [float("-inf"), 1.0, 1.0, 0.5]])
    same(backends.quantiles(*on(device, vectors, 0.0)), right(encode_sparse.quantiles, vectors, 0.0))


@pytest.mark.parametrize("shape", [(2, 3, 64, 40), (1, 1, 32, 200), (1, 2, 96, 1)], ids=str)
@pytest.mark.parametrize("share", [0.02, 0.6])
def test_pack_outliers(device, shape, share):  # noqa: F811
    """A slice of a larger tensor, heads after tokens; values beyond float16's range, and a block
    without outliers."""
    B, H, T, D = shape
    torch.manual_seed(D)
    residual = (torch.randn(B, T, H, D + 3) * 1e3).transpose(1, 2)[..., 1 : D + 1]
    residual[..., -1] *= 1e3
    chosen = torch.rand(B, H, D, T).mT < share
    chosen[0, 0, :32] = False
    call = residual, chosen
    result, expected = backends.pack_outliers(*on(device, *call)), right(encode_sparse.pack_outliers, *call)
    assert [x.dtype for x in result] == [x.dtype for x in expected]
    same(result, expected)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_none_and_all(device, all_of_them):  # noqa: F811
    call = torch.randn(1, 2, 32, 8), torch.full((1, 2, 32, 8), all_of_them)
    same(backends.pack_outliers(*on(device, *call)), right(encode_sparse.pack_outliers, *call))


def test_no_tokens(device):  # noqa: F811
    nothing = torch.zeros(1, 2, 0, 8, device=device)
    entries = backends.pack_outliers(nothing, nothing.bool())
    assert entries.starts.shape == (1, 2, 0)
    assert len(entries.places) == len(entries.values) == 0


def test_why_not(device):  # noqa: F811
    if device == "cuda":
        pytest.skip("refusals do not depend on the device")
    x = torch.zeros(1, 1, 32, 8)
    assert kernels.why_not_quantiles(x, 0.1) is None
    assert "float64" in str(kernels.why_not_quantiles(x.double(), 0.1))
    assert "8193 entries" in str(kernels.why_not_quantiles(torch.zeros(1, 8193), 0.1))
    assert "gradient" in str(kernels.why_not_quantiles(x.clone().requires_grad_(), 0.1))
    assert kernels.why_not_pack_outliers(x, x.bool()) is None
    assert "chosen is torch.float32" in str(kernels.why_not_pack_outliers(x, x))
    assert "chosen is torch.bool [1, 1, 32, 4]" in str(kernels.why_not_pack_outliers(x, x.bool()[..., :4]))
    assert "whole blocks" in str(kernels.why_not_pack_outliers(x[:, :, :20], x.bool()[:, :, :20]))
