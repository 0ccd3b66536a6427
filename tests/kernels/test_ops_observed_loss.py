"""The loss that queries show: the native kernel against the reference in float64."""

import pytest
import torch

from native_calls import why_not
from tersekv.kernels.cpu import fit
from tersekv.kernels.observed_loss import observed_loss, squared_weights
from test_ops_parity import isa, one_thread, pytestmark, two_threads  # noqa: F401


def drawn(B, H, G, q, T, D, Dv, seed=0):
    g = torch.Generator().manual_seed(seed + T)
    query, keys, values = (torch.randn(B, H, n, d, generator=g) for n, d in ((G * q, D), (T, D), (T, Dv)))
    mask, counts = torch.rand(B, q, T, generator=g) > 0.3, (torch.rand(B, T, generator=g) > 0.1).float()
    return query, keys, values, mask, counts, D**-0.5, None, None


def check(call, operator=observed_loss):
    expected = operator.reference(
        *(x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in call)
    )
    found = getattr(fit, operator.name)(*call)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-9)


SIZES = [(1, 3, 3, 32, 260, 64, 64), (2, 2, 2, 7, 100, 32, 48), (2, 1, 4, 1, 5, 16, 16), (1, 1, 4, 6, 4100, 32, 16)]


@pytest.mark.parametrize("sizes", SIZES)
def test_sums(isa, sizes):  # noqa: F811
    check(drawn(*sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_squared_weights(isa, sizes, dtype):  # noqa: F811
    """All queries and keys are bfloat16, whose products are exact."""
    query, keys, _, mask, _, scaling, *_ = drawn(*sizes)
    query, keys = query.bfloat16().float(), keys.bfloat16().to(dtype)
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    mask[:, -1, :] = False
    sinks = torch.randn(keys.shape[1], query.shape[2])
    for seen, *rest in ((mask, scaling, None, None), (mask[:1, :, :0], scaling, None, sinks),
                        (mask[:, :, 3:], 5.0, 3.0, sinks), (mask[:1, :, 3:], scaling, None, None)):  # fmt: skip
        check((query, keys, seen, *rest), squared_weights)


def test_shared_masks_softcaps_and_sinks(two_threads):  # noqa: F811
    query, keys, values, mask, counts, scaling, _, _ = drawn(2, 2, 3, 20, 90, 32, 32)
    check((query, keys, values, mask[:1], counts[:1], scaling, None, None))
    check((query, keys, values, mask, counts, 5.0, 3.0, torch.randn(2, 60)))
    check((query, keys, values, mask, counts, scaling, None, torch.full((2, 60), 30.0)))


def test_a_position_that_sees_nothing_shows_nothing(isa):  # noqa: F811
    query, keys, values, mask, counts, *rest = drawn(1, 2, 2, 3, 40, 16, 16)
    mask[:, 1] = False
    check((query, keys, values, mask, counts, *rest))
    shares = fit.observed_loss(query, keys, values, mask, counts, *rest)[2]
    assert not shares[..., 1::3].any()
    assert shares[..., ::3].all()


def test_equal_values_lose_nothing(isa):  # noqa: F811
    """|v − o|² is not negative where it is rounded."""
    query, keys, values, *rest = drawn(1, 1, 2, 4, 50, 16, 16)
    of_keys, of_values, _ = fit.observed_loss(query, keys, torch.full_like(values, 7.7), *rest)
    assert (of_keys >= 0).all()
    assert of_keys.amax() < 1e-3 * of_values.amax()


def test_masks_of_the_last_tokens(isa):  # noqa: F811
    query, keys, values, mask, *rest = drawn(1, 2, 2, 3, 40, 16, 16)
    mask[..., :30] = True
    whole = fit.observed_loss(query, keys, values, mask, *rest)
    for ours, theirs in zip(fit.observed_loss(query, keys, values, mask[..., 30:], *rest), whole, strict=True):
        assert torch.equal(ours, theirs)
    check((query, keys, values, mask[..., 30:], *rest))
    check((query, keys, values, mask[..., 40:], *rest))


def test_heads_that_the_kernel_leaves_to_the_reference():
    query, keys, values, *rest = drawn(1, 2, 2, 3, 40, 24, 24)
    assert "not a multiple of 16" in why_not(fit.observed_loss, query, keys, values, *rest)
    empty = (query[..., :16], keys[:, :, :0, :16], values[:, :, :0, :16], rest[0][..., :0], rest[1][:, :0], *rest[2:])
    assert "no tokens" in why_not(fit.observed_loss, *empty)
    with pytest.raises(ValueError, match="positions that divide"):
        fit.observed_loss(query[:, :, :5, :16], keys[..., :16], values[..., :16], *rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tokens_of_any_type_as_a_model_gives_them(isa, dtype):  # noqa: F811
    query, keys, values, *rest = drawn(2, 2, 2, 3, 270, 32, 16)
    keys, values = (x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))
    check((query, keys, values, *rest))
