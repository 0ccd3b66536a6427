"""Attention of many query rows, by our kernel and by torch's fused attention, equals the plain softmax."""

from __future__ import annotations

import pytest
import torch

from tersekv.kernels import softmax


@pytest.fixture(autouse=True, params=["torch", "ours"])
def kernel(request, monkeypatch):
    if request.param == "torch":  # as with AMX
        monkeypatch.setattr(softmax, "prefers_native", lambda *_: False)


def plain(query, key, value, mask, scaling, softcap):
    scores = torch.matmul(query, key.float().transpose(-1, -2))
    return softmax.attend_scores(scores, value.float(), mask, scaling, softcap)


def same(query, key, value, mask, softcap=None):
    found = softmax.attend_many(query, key, value, mask, 0.3, softcap)
    for a, b in zip(found, plain(query, key, value, mask, 0.3, softcap), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [(64, 64), (16, 16), (64, 32), (32, 64)])
@pytest.mark.parametrize("tokens", [0, 1, 33, 1024])
@pytest.mark.parametrize("rows", [2, 31, 96])
def test_shapes(rows, tokens, dim):
    torch.manual_seed(0)
    query = torch.randn(2, 3, rows, dim[0])
    same(query, torch.randn(2, 3, tokens, dim[0]), torch.randn(2, 3, tokens, dim[1]), None)


@pytest.mark.parametrize("heads", [None, 3])
def test_masks_and_rows_that_see_nothing(heads):
    torch.manual_seed(0)
    mask = torch.rand((2, 40, 70) if heads is None else (2, heads, 40, 70)) > 0.6
    mask[..., 3, :] = False
    mask[1] = False
    same(torch.randn(2, 3, 80, 32), torch.randn(2, 3, 70, 32), torch.randn(2, 3, 70, 32), mask)


def test_strides_of_any_kind_and_16_bits():
    """Decoded tensors may be transposed, and all rows of a batch may share one."""
    torch.manual_seed(0)
    across = torch.randn(2, 3, 48, 64).transpose(-1, -2)
    same(torch.randn(2, 3, 48, 64).transpose(-1, -2), across, across.bfloat16(), None)
    same(torch.randn(2, 3, 64, 48), across[:1], across[:1].half(), torch.ones(1, 64, 64, dtype=torch.bool).tril())


def test_softcap():
    torch.manual_seed(0)
    same(torch.randn(1, 1, 64, 32), torch.randn(1, 1, 50, 32), torch.randn(1, 1, 50, 32), None, softcap=2.0)


@pytest.mark.parametrize("most", [1, 3000])
@pytest.mark.parametrize("dim", [16, 48])
@pytest.mark.parametrize("masked", ["rows", "heads", "all queries", "no"])
def test_some_rows_at_a_time(monkeypatch, masked, dim, most):
    """Masks and scores are made for parts of the queries, whose rows belong to several heads."""
    torch.manual_seed(0)
    wanted = {"rows": (2, 40, 70), "heads": (2, 3, 40, 70), "all queries": (2, 1, 70), "no": None}[masked]
    mask = None if wanted is None else torch.rand(wanted) > 0.6
    monkeypatch.setattr(softmax, "MOST_SCORES", most)
    same(torch.randn(2, 3, 80, 32), torch.randn(2, 3, 70, 32), torch.randn(2, 3, 70, dim), mask)


def test_a_chunk_over_its_own_tokens():
    torch.manual_seed(0)
    query, keys, values = torch.randn(2, 3, 4, 50, 32), torch.randn(2, 3, 50, 32), torch.randn(2, 3, 50, 32)
    mask = torch.ones(2, 50, 50, dtype=torch.bool).tril()
    for dim in (32, 16):  # values of latent attention are narrower than keys
        found = softmax.attend_causal(query, keys, values[..., :dim], 0.3, None)
        for a, b in zip(found, plain(query.flatten(2, 3), keys, values[..., :dim], mask, 0.3, None), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)
    assert softmax.attend_causal(query, keys, values, 0.3, 2.0) is None
    assert softmax.attend_causal(query[..., :16], keys[..., :16], values, 0.3, None) is None


def test_products_in_bfloat16():
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, 2, 64, 32).bfloat16() for _ in range(3))
    found = softmax.attend_many(query, keys, values, None, 0.3, None)
    for a, b in zip(found, plain(query.float(), keys, values, None, 0.3, None), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_gradients():
    """Also that of the log-sum-exp, by which segments are merged."""
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, 2, 64, 32, requires_grad=True) for _ in range(3))
    found = []
    for attend in (softmax.attend_many, plain):
        out, lse = attend(query, keys, values, None, 0.3, None)
        found.append(torch.autograd.grad((out * torch.arange(32)).sum() + lse.square().sum(), (query, keys, values)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    assert softmax.attend_causal(query.unsqueeze(2), keys, values, 0.3, None) is None
