"""Bases of 6-bit entries, fitted and multiplied with: the native operators against the reference, and
refused arguments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native_calls import why_not
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.errors import UserError
from tersekv.kernels import backends, basis
from tersekv.kernels.basis import (
    basis_components,
    basis_product,
    fitted_basis,
    inverses,
    packed_basis,
    unpacked_basis,
    within,
)
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.kernels.cpu import fit as cpu_fit
from tersekv.kernels.registry import NotTaken
from tersekv.kernels.weighted_sums import weighted_sums
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope
from test_ops_parity import isa, one_thread, pytestmark, two_threads  # noqa: F401


def drawn(rows, H, D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, H, D, D, generator=generator, dtype=torch.float64)
    return packed_basis(matrix, torch.rand(rows, H, D, generator=generator, dtype=torch.float64) + 0.1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 32), st.booleans(), st.booleans())
def test_products(B, H, R, fours, one_row, combine):
    kept = drawn(1 if one_row else B, H, 4 * fours)
    x = torch.randn(B, H, R, 4 * fours)
    expected = basis_product.reference(x, **kept, combine=combine)
    torch.testing.assert_close(cpu_attend.basis_product(x, **kept, combine=combine), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("combine", [True, False])
def test_batch_rows_of_one_matrix_are_divided_among_threads(two_threads, combine):  # noqa: F811
    kept, x = drawn(1, 1, 128), torch.randn(5, 1, 4, 128)
    found = [cpu_attend.basis_product(x, **kept, combine=combine)]
    for threads in (1, 3, 9):
        torch.set_num_threads(threads)
        found.append(cpu_attend.basis_product(x, **kept, combine=combine))
    assert all(torch.equal(other, found[0]) for other in found[1:])
    expected = basis_product.reference(x, **kept, combine=combine)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 7, 300]), st.integers(1, 8), st.booleans())
def test_components(B, H, R, sixteens, one_row):
    kept, D = drawn(1 if one_row else B, H, 16 * sixteens), 16 * sixteens
    y = torch.randn(B, H, R, D)
    x = (y.double() @ unpacked_basis(**kept)).float()
    found = cpu_attend.basis_components(x, **kept)
    expected = basis_components.reference(x, **kept)
    size = expected.abs().amax((-1, -2), keepdim=True)
    torch.testing.assert_close(found / size, expected / size, rtol=1e-5, atol=1e-5)
    back = (found.double() @ unpacked_basis(**kept)).float()
    torch.testing.assert_close(back, x, rtol=1e-3, atol=1e-3 * float(x.abs().max()))


def test_components_do_not_depend_on_the_batch():
    kept, x = drawn(1, 2, 64), torch.randn(3, 2, 300, 64)
    whole = cpu_attend.basis_components(x, **kept)
    assert torch.equal(cpu_attend.basis_components(x[1:2, :, 257:260], **kept), whole[1:2, :, 257:260])


def test_an_entry_of_zero_on_the_diagonal_is_no_obstacle():
    rows = torch.eye(32, dtype=torch.float64).flip(0).expand(1, 1, 32, 32)
    kept, x = packed_basis(rows, torch.ones(1, 1, 32).double()), torch.randn(1, 1, 3, 32)
    torch.testing.assert_close(cpu_attend.basis_components(x, **kept), x.flip(-1) / 31, rtol=1e-6, atol=1e-6)


def test_several_wide_bases_are_inverted_on_two_threads(two_threads):  # noqa: F811
    """torch fails to invert them in one call (pytorch/pytorch#142815)."""
    rows = unpacked_basis(**drawn(2, 3, 256))
    rows[1, 2, 5] = 0
    inverse, singular = inverses(rows)
    assert singular.nonzero().tolist() == [[1, 2]]
    one = torch.eye(256, dtype=torch.float64).expand(5, 256, 256)
    torch.testing.assert_close(inverse[~singular] @ rows[~singular], one, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("combine", "sum_over"), [(True, "bhrd,bhdc->bhrc"), (False, "bhrc,bhdc->bhrd")])
def test_rows_are_combined_and_multiplied(combine, sum_over):
    kept, x = drawn(1, 2, 32), torch.randn(1, 2, 3, 32)
    expected = torch.einsum(sum_over, x, unpacked_basis(**kept).float())
    torch.testing.assert_close(backends.basis_product(x, **kept, combine=combine), expected, rtol=1e-5, atol=1e-3)


def test_other_strides_and_types_of_channels():
    kept, x = drawn(1, 2, 32), torch.randn(1, 3, 2, 32).transpose(1, 2)
    expected = basis_product.reference(x, **kept, combine=False)
    torch.testing.assert_close(cpu_attend.basis_product(x, **kept, combine=False), expected, rtol=1e-5, atol=1e-3)


def test_widths_that_the_kernel_leaves_to_the_reference():
    kept, x = drawn(1, 2, 6), torch.randn(1, 2, 3, 6)
    assert "not a multiple of 4" in why_not(cpu_attend.basis_product, x, **kept, combine=False)
    assert "not a multiple of 16" in why_not(cpu_attend.basis_components, torch.randn(1, 2, 3, 24), **drawn(1, 2, 24))
    with pytest.raises(NotTaken, match="multiple of 4"):
        cpu_attend.basis_product(x, **kept, combine=False)
    assert torch.equal(
        backends.basis_product(x, **kept, combine=False), basis_product.reference(x, **kept, combine=False)
    )
    with backends.forced("cpu"), pytest.raises(UserError, match="basis_product"):
        backends.basis_product(x, **kept, combine=False)


@pytest.mark.parametrize("wrong", ["basis", "channels"])
def test_sizes_that_do_not_agree(wrong):
    kept, x = drawn(1, 2, 32), torch.randn(1, 2, 3, 32)
    kept[wrong] = kept[wrong][..., :-1]
    with pytest.raises(ValueError, match=wrong):
        cpu_attend.basis_product(x, **kept, combine=False)


@pytest.mark.parametrize(("B", "H", "T", "D"), [(1, 3, 1, 16), (2, 1, 127, 48), (1, 2, 300, 64), (1, 1, 257, 128)])
def test_weighted_sums(isa, B, H, T, D):  # noqa: F811
    x, weights = torch.randn(B, H, T + 3, D)[:, :, 3:], torch.rand(B, H, T)
    found, expected = cpu_fit.weighted_sums(x, weights), weighted_sums.reference(x.double(), weights.double())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    assert torch.equal(found[1], found[1].mT)
    assert "not a multiple of 16" in why_not(cpu_fit.weighted_sums, x[..., :9], weights)


def covariances(B, H, D, tokens, seed=0):
    """Covariances of channels with other variances, float64 [B, H, D, D], and a metric [B, H, D]."""
    g = torch.Generator().manual_seed(seed + D)
    x = torch.randn(B, H, tokens, D, generator=g, dtype=torch.float64) @ torch.randn(D, D, generator=g).double()
    x *= torch.rand(D, generator=g).mul(6).exp2()
    return x.mT @ x / tokens, torch.rand(B, H, D, generator=g).double() + 0.01


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("B", "H", "D", "tokens"), [(1, 1, 16, 500), (2, 3, 48, 500), (1, 3, 64, 40), (1, 1, 256, 900)]
)
def test_fitted_bases(isa, B, H, D, tokens, whole):  # noqa: F811
    covariance, metric = covariances(B, H, D, tokens)
    if whole:
        queries = torch.randn(B, H, 3, D, generator=torch.Generator().manual_seed(D), dtype=torch.float64)
        metric = metric.diag_embed() + queries.mT @ queries
    found, expected = cpu_fit.fitted_basis(covariance, metric), fitted_basis.reference(covariance, metric)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in expected]
    assert torch.equal(found.channels, expected.channels)
    rows = unpacked_basis(found.basis, found.channels)
    own = within(covariance, inverses(rows)[0].mT)
    torch.testing.assert_close(found.variance, own, rtol=1e-7, atol=1e-12 * float(own.max()))
    torch.testing.assert_close(found.weight, within(metric, rows))
    assert (rows.unsqueeze(-2) @ rows.unsqueeze(-1)).amin() > 0
    # rounding the same eigenvectors costs as much, and no more where a variance is far below the others
    ours, theirs = (x.variance * x.weight for x in (found, expected))
    torch.testing.assert_close(ours.sum(-1), theirs.sum(-1), rtol=1e-3 if tokens > D else 1e-2, atol=0)
    kept = slice(min(D, tokens) // 2)
    torch.testing.assert_close(ours[..., kept].log().mean(), theirs[..., kept].log().mean(), rtol=0, atol=5e-3)


def test_bases_of_special_covariances(isa, monkeypatch):  # noqa: F811
    covariance, metric = covariances(1, 4, 32, 400)
    covariance[:, 0, :5] = covariance[:, 0, :, :5] = 0
    covariance[:, 1] = 0
    covariance[:, 2] *= 1e-200
    metric[:, 3, :5] *= 1e-14
    found, expected = cpu_fit.fitted_basis(covariance, metric), fitted_basis.reference(covariance, metric)
    assert not found.variance[:, 1].any()
    assert not inverses(unpacked_basis(found.basis, found.channels))[1].any()
    ours, theirs = ((x.variance * x.weight).sum(-1) for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=0)
    monkeypatch.setattr(basis, "MOST_CONDITION", 0.1)  # as if rounding had made rows dependent
    found, expected = cpu_fit.fitted_basis(covariance, metric), fitted_basis.reference(covariance, metric)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_bases_of_variances_that_fall_to_nothing(isa):  # noqa: F811
    """An eigenvector that is not found would leave the channels as they are, which costs more."""
    vectors = torch.linalg.qr(torch.randn(1, 20, 64, 64, dtype=torch.float64))[0]
    covariance = vectors @ torch.logspace(0, -60, 64, dtype=torch.float64).diag() @ vectors.mT
    found = cpu_fit.fitted_basis(covariance, torch.ones(1, 20, 64).double())
    loss = found.variance * found.weight
    assert (loss[..., 20:].sum(-1) < 0.01 * loss.sum(-1)).all()


def test_other_strides_and_shared_metrics():
    covariance, metric = covariances(2, 3, 32, 400)
    metric = metric[:1].mT.contiguous().mT
    found, expected = (cpu_fit.fitted_basis(covariance, x) for x in (metric, metric.expand(2, 3, 32).contiguous()))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    x, weights = torch.randn(2, 3, 40, 32), torch.rand(1, 1, 40)
    found, expected = cpu_fit.weighted_sums(x, weights), weighted_sums.reference(x, weights)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-4)


def test_bases_that_the_kernel_leaves_to_the_reference():
    covariance, metric = covariances(1, 2, 32, 400)
    assert "not a multiple of 16" in why_not(cpu_fit.fitted_basis, covariance[..., :8, :8], metric[..., :8])
    for wrong in (torch.nan, torch.inf):
        covariance[0, 1, 3, 3] = wrong
        assert "not finite" in why_not(cpu_fit.fitted_basis, covariance, metric)
    whole = fitted_basis.reference(*(x[:, :1] for x in (covariance, metric.diag_embed())))
    diagonal = fitted_basis.reference(*(x[:, :1] for x in (covariance, metric)))
    torch.testing.assert_close(whole.variance * whole.weight, diagonal.variance * diagonal.weight, rtol=1e-2, atol=0)


@pytest.mark.parametrize("D", [20, 100, 120])
@pytest.mark.parametrize("recipe", ["default", "trellis:calibration=prompt,centre=false", "oscar:calibration=prompt"])
def test_heads_of_any_width_are_read_by_the_kernel(D, recipe):
    """Some models have 100 or 120 channels. Decoding in torch takes ten times as long at each step."""
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 40 * D, D, generator=g)
    store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys[:, :, :0], values[:, :, :0], rope=standard_rope(D))
    store.append(keys, values)
    call = AttentionCall(torch.randn(1, 4, 1, D, generator=g), None, D**-0.5)
    with backends.forced("reference"):
        expected = attend_store(store, call)
    with backends.forced("cpu"):
        torch.testing.assert_close(attend_store(store, call), expected, rtol=1e-3, atol=1e-4)
