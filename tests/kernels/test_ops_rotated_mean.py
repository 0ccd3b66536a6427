"""Sums of rotated tokens, and tokens without a rotated mean: the native kernels against the reference in float64."""

import pytest
import torch

from tersekv.kernels import rotated_mean
from tersekv.kernels.cpu import fit
from tersekv.kernels.registry import NotTaken
from test_ops_parity import isa, one_thread, pytestmark, two_threads  # noqa: F401


def drawn(B, H, T, D, rows, heads, dtype):
    g = torch.Generator().manual_seed(T)
    x = torch.randn(B, T, H, D, generator=g).to(dtype).transpose(1, 2)  # as a model gives it
    cos, sin = torch.randn(2, rows, heads, T, D, generator=g)
    return x, cos, sin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(1, 3, 300, 64, 1, 1), (2, 2, 129, 48, 2, 1), (2, 3, 5, 16, 1, 3), (2, 1, 257, 32, 2, 1)]
)
def test_rotated(isa, two_threads, sizes, dtype):  # noqa: F811
    x, cos, sin = drawn(*sizes, dtype)
    exact = x.double(), cos.double(), sin.double()
    sums = fit.rotated_sums(x, cos, sin), rotated_mean.rotated_sums.reference(*exact)
    for ours, theirs in zip(*sums, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    mean, across = torch.randn(2, sizes[0], sizes[1], 1, sizes[3], generator=torch.Generator().manual_seed(1))
    for rows in (slice(None), slice(1)):
        found = fit.without_rotated_mean(x, mean[rows], across[rows], cos, sin)
        expected = rotated_mean.without_rotated_mean.reference(
            exact[0], mean[rows].double(), across[rows].double(), *exact[1:]
        )
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_sums_of_many_tokens(isa):  # noqa: F811
    """In float32 alone, the sum stops at 2^24."""
    x = torch.ones(1, 1, (1 << 24) // 16, 16)
    x[:, :, 0] = 1 << 24
    along, across = fit.rotated_sums(x, torch.ones_like(x), torch.zeros_like(x))
    torch.testing.assert_close(along.double(), x.double().sum(2), rtol=1e-5, atol=0)
    assert not across.any()


def test_other_calls(isa):  # noqa: F811
    x, cos, sin = drawn(1, 2, 4, 16, 1, 1, torch.float32)
    with pytest.raises(NotTaken, match="multiple of 16"):
        fit.rotated_sums(x[..., :8], cos[..., :8], sin[..., :8])
    with pytest.raises(NotTaken):
        fit.rotated_sums(x.double(), cos, sin)
    with pytest.raises(ValueError, match="rows and heads"):
        fit.rotated_sums(x, cos.expand(1, 3, -1, -1), sin.expand(1, 3, -1, -1))
    with pytest.raises(ValueError, match="T"):
        fit.rotated_sums(x, cos[:, :, :3], sin[:, :, :3])
    mean = torch.randn(1, 2, 1, 16)
    with pytest.raises(ValueError, match="H"):
        fit.without_rotated_mean(x, mean[:, :1], mean[:, :1], cos, sin)
