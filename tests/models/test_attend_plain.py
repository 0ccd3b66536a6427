"""Attention of a prompt by our kernel equals transformers' attention with sdpa."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tersekv.kernels import cpu
from tersekv.models import attention

pytestmark = pytest.mark.skipif(cpu.why_not_built() is not None, reason=f"{cpu.why_not_built()}")
T = 70


def arguments(**kwargs):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = True, 2
    query, keys, values = torch.randn(2, 4, T, 32), torch.randn(2, 2, T, 32), torch.randn(2, 2, T, 32)
    return (module, query, keys, values, kwargs.pop("mask", None), 0.0, 0.3), kwargs


def window():
    place = torch.arange(T)
    seen = (place <= place[:, None]) & (place > place[:, None] - 20)
    return seen.expand(2, 1, T, T)


def padded():
    mask = torch.ones(T, T, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[1, :, :, :9] = torch.eye(T, dtype=torch.bool)[:, :9]  # transformers lets padding see itself
    return mask


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"mask": window()}, {"mask": padded()}, {"is_causal": False}, {"mask": window()[..., :-1, :]}],
    ids=["causal", "window", "padded", "not causal", "fewer queries"],
)
def test_like_sdpa(monkeypatch, kwargs):
    (module, query, *rest), kwargs = arguments(**kwargs)
    if kwargs.get("mask", rest[2]) is not None:
        query = query[:, :, : rest[2].shape[2]]
    wanted = sdpa_attention_forward(module, query, *rest, **kwargs)[0]
    found = attention._natively(module, query, *rest, **kwargs)
    torch.testing.assert_close(found, wanted)
    monkeypatch.setattr(attention, "sdpa_attention_forward", None)
    torch.testing.assert_close(attention.attend_plain(module, query, *rest, **kwargs), wanted)


@pytest.mark.parametrize("why", ["a bias", "heads differ", "gradient", "dropout", "few rows", "no last tokens"])
def test_left_to_transformers(why):
    (module, query, keys, values, mask, dropout, scaling), kwargs = arguments()
    mask = {"a bias": torch.randn(2, 1, T, T), "heads differ": window().expand(2, 4, T, T)}.get(why, mask)
    query = query.requires_grad_() if why == "gradient" else query[:, :, :3] if why == "few rows" else query
    keys, values = (x[:, :, :-1] if why == "no last tokens" else x for x in (keys, values))
    dropout = 0.1 if why == "dropout" else dropout
    assert attention._natively(module, query, keys, values, mask, dropout, scaling, **kwargs) is None
