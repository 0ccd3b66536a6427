"""Fitted components and the arguments of their search: the native kernels against the references."""

import pytest
import torch

from native_calls import why_not
from tersekv.codecs.codebooks.bits import SQUARED_ERROR, falls, searched_error
from tersekv.kernels import components, weighted_sums
from tersekv.kernels.basis import packed_basis
from tersekv.kernels.cpu import fit
from test_ops_parity import isa, one_thread, pytestmark, two_threads  # noqa: F401

FALLS = falls(SQUARED_ERROR["trellis"])


def drawn(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(2, *shape, generator=g, dtype=torch.float64) * 3).exp().unbind(0)


@pytest.mark.parametrize(("total", "factor"), [(0, 1.0), (48, 8.0), (112, 8.0), (128, 1.0), (200, 8.0)])
def test_fitted_components(total, factor):
    variance, weight = drawn(2, 3, 16)
    variance[0, 0] = 0  # no variance: all scales are 1, and bits go to the first components
    variance[0, 1] = 1e9 * torch.arange(16)  # the product with the factor is too large
    variance[0, 2, 3:] = 1e-12
    weight[1, 0] = 0
    weight[1, 1] = weight[1, 1, 0]
    ours = fit.fitted_components(variance, weight, FALLS, total, factor)
    theirs = components.fitted_components.reference(variance, weight, FALLS, total, factor)
    for name, got, expected in zip(ours._fields, ours, theirs, strict=True):
        assert got.dtype == expected.dtype, name
        assert torch.equal(got, expected), name
    assert (ours.bits.sum(-1) == min(total, 128)).all()


def test_equal_gains_go_to_the_first():
    variance = weight = torch.ones(1, 1, 16, dtype=torch.float64)
    bits = fit.fitted_components(variance, weight, FALLS, 20, 1.0).bits
    assert bits[0, 0].tolist() == [2] * 4 + [1] * 12


def test_components_that_are_not_finite():
    variance, weight = drawn(1, 2, 16)
    for odd in (torch.nan, torch.inf, -1.0):
        for given in ((variance, weight.clone()), (variance.clone(), weight)):
            for x in given:
                x[0, 1, 5] = odd
            assert "not finite" in why_not(fit.fitted_components, *given, FALLS, 32, 8.0)
            variance, weight = drawn(1, 2, 16)


@pytest.mark.parametrize("rows", [1, 2])
def test_search_arguments(isa, two_threads, rows):  # noqa: F811
    g = torch.Generator().manual_seed(rows)
    basis = packed_basis(torch.randn(rows, 3, 32, 32, generator=g).double(), torch.rand(rows, 3, 32).double() + 0.5)
    scale, weight = (torch.rand(2, rows, 3, 32, generator=g) + 0.1).half()
    bits = torch.randint(0, 9, (rows, 3, 32), generator=g, dtype=torch.uint8)
    call = *basis.values(), scale, weight, bits, searched_error("trellis")
    for got, expected in zip(fit.search_arguments(*call), components.search_arguments.reference(*call), strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=1e-6)
    with pytest.raises(ValueError, match="at most 8, got 9"):
        fit.search_arguments(*call[:4], torch.full_like(bits, 9), call[5])


def test_relative_weights():
    weights = torch.rand(2, 4, 100, generator=torch.Generator().manual_seed(0))
    weights[0, 1], weights[0, 2, 5], weights[0, 3] = 0, torch.nan, 3e38
    weights[1, 0, 7] = torch.inf
    weights[1, 1] *= 1e-40  # as of a head whose weight lies on a sink
    weights[1, 2, 0] = 0
    for given in (weights, weights[:, :, 3:40], weights[:, :, :0]):
        got, expected = fit.relative_weights(given, 0.3), weighted_sums.relative_weights.reference(given.double(), 0.3)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(fit.relative_weights(given.double(), 0.3), expected, rtol=1e-12, atol=0)
    assert (fit.relative_weights(weights, 0.3)[0, 1:3] == 1).all()
