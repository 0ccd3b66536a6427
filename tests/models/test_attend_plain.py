"""Attention of a prompt by our kernel equals transformers' attention with sdpa."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import tersekv
from conftest import prompt
from tersekv.kernels import cpu
from tersekv.models import attention

pytestmark = pytest.mark.skipif(cpu.why_not_built() is not None or cpu.isa() == "scalar", reason="slower than torch")
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
    monkeypatch.setattr(attention, "sdpa_attention_forward", None)
    torch.testing.assert_close(attention.attend_plain(module, query, *rest, **kwargs), wanted)


@pytest.mark.parametrize("kwargs", [{"softcap": 2.0}, {"s_aux": torch.linspace(-1, 1, 4)}], ids=["softcap", "sinks"])
@pytest.mark.parametrize("causal", [True, False])
def test_what_sdpa_lacks_is_the_same_with_and_without_our_kernel(monkeypatch, causal, kwargs):
    call, _ = arguments()
    found = attention.attend_tensors(*call, is_causal=causal, **kwargs)[0]
    monkeypatch.setattr(attention, "_natively", lambda *_, **__: None)
    torch.testing.assert_close(attention.attend_tensors(*call, is_causal=causal, **kwargs)[0], found)


def test_compiled_in_one_graph():
    """A compiler cannot trace our kernel, so transformers' attention is compiled."""
    call, _ = arguments()
    compiled = torch.compile(attention.attend_plain, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*call), attention.attend_plain(*call))


REASONS = ["a bias", "heads differ", "gradient", "few rows", "no last tokens", "one query for all", "float64"]


@pytest.mark.parametrize("why", REASONS)
def test_left_to_transformers(why):
    (_, query, keys, values, mask, _, scaling), _ = arguments()
    query = query[:1] if why == "one query for all" else query.double() if why == "float64" else query
    mask = {"a bias": torch.randn(2, 1, T, T), "heads differ": window().expand(2, 4, T, T)}.get(why, mask)
    query = query.requires_grad_() if why == "gradient" else query[:, :, :3] if why == "few rows" else query
    keys, values = (x[:, :, :-1] if why == "no last tokens" else x for x in (keys, values))
    assert attention._natively(query, keys, values, mask, True, scaling) is None


def test_dropout_is_left_to_transformers(monkeypatch):
    (*call, _, scaling), _ = arguments()
    monkeypatch.setattr(attention, "_natively", None)
    assert attention.attend_plain(*call, 0.1, scaling).shape == (2, T, 4, 32)


def test_a_second_turn_with_a_mask_in_another_order_of_memory(llama):
    mask = torch.ones(40, 40, dtype=torch.bool).triu().T[None, None].clone(memory_format=torch.preserve_format)
    mask[..., 20:30, 20:30] = True  # these tokens see each other
    assert mask.stride(-1) != 1
    ids = prompt(40)
    with torch.no_grad(), tersekv.compress(llama, "exact"):
        cache = tersekv.CompressedCache(llama.config, "exact")
        llama(ids[:, :10], attention_mask=mask[..., :10, :10], past_key_values=cache)
        found = llama(ids[:, 10:], attention_mask=mask[..., 10:, :], past_key_values=cache).logits
    with torch.no_grad():
        wanted = llama(ids, attention_mask=mask.contiguous()).logits[:, 10:]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
