"""Products with a basis of 6-bit entries: the native ones against the reference, and refused
arguments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from native_calls import why_not
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.kernels.basis import basis_components, basis_product, inverses, packed_basis, unpacked_basis
from tersekv.kernels.cpu import attend as cpu_attend
from tersekv.kernels.registry import NotTaken
from test_ops_parity import one_thread, pytestmark, two_threads  # noqa: F401


def drawn(rows, H, D, seed=0):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, H, D, D, generator=generator, dtype=torch.float64)
    return packed_basis(matrix, torch.rand(rows, H, D, generator=generator, dtype=torch.float64) + 0.1)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(1, 8), st.booleans(), st.booleans())
def test_products(B, H, R, sixteens, one_row, combine):
    kept = drawn(1 if one_row else B, H, 16 * sixteens)
    x = torch.randn(B, H, R, 16 * sixteens)
    expected = basis_product.reference(x, **kept, combine=combine)
    torch.testing.assert_close(cpu_attend.basis_product(x, **kept, combine=combine), expected, rtol=1e-5, atol=1e-3)


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


@pytest.mark.parametrize("D", [6, 24])
def test_widths_that_the_kernel_leaves_to_the_reference(D):
    kept, x = drawn(1, 2, D), torch.randn(1, 2, 3, D)
    assert "not a multiple of 16" in why_not(cpu_attend.basis_product, x, **kept, combine=False)
    with pytest.raises(NotTaken, match="multiple of 16"):
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
