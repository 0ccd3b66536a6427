"""Tokens that represent others: the operator against its formula, and a layer's estimate against
sums over its slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tersekv.attention.read import AttentionCall, attend_chunk, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.errors import UserError
from tersekv.kernels.softmax import attend_weighted
from tersekv.recipe import Recipe
from test_store import tokens


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [False, True])
def test_weighted_op_is_its_formula(softcap, heads):
    generator = torch.Generator().manual_seed(0)
    scores, value = torch.randn(2, 3, 4, 9, generator=generator), torch.randn(2, 3, 9, 5, generator=generator)
    above, below = torch.randn(2, 2, 3, 9, generator=generator)
    below[..., 4] = -torch.inf
    mask = torch.rand(2, 3, 2, 9, generator=generator) < 0.7
    mask = mask if heads else mask[:, 0]
    out, top, bottom = attend_weighted(scores, value, mask, 0.5, softcap, above, below)
    s = scores.double() * 0.5
    s = s if softcap is None else torch.tanh(s / softcap) * softcap
    seen = (mask if heads else mask[:, None]).repeat(1, 1 if heads else 3, 2, 1)
    numerator = torch.where(seen, (s + above.unsqueeze(2)).exp(), 0.0)
    denominator = torch.where(seen, (s + below.unsqueeze(2)).exp(), 0.0)
    torch.testing.assert_close(out * top.exp().unsqueeze(-1), (numerator @ value.double()).float())
    torch.testing.assert_close(top, numerator.sum(-1).log().float())
    torch.testing.assert_close(bottom, denominator.sum(-1).log().float())
    assert attend_weighted(scores, None, mask, 0.5, softcap, None, below)[:2] == (None, None)


def by_slots(
    store: LayerStore, keys: Tensor, values: Tensor, query: Tensor, padding: int, row: int, head: int
) -> Tensor:
    """Compute Algorithm 1's z/τ for one query [D] from the slots, with sinks and recent window in
    both sums."""
    keys, values, query = keys[row, head].double(), values[row, head].double(), query.double()
    weight = (keys @ query * 0.125).exp()
    exact = [
        *range(padding, padding + store.policy.sinks),
        *range(store.num_tokens - store.recent.tokens, store.num_tokens),
    ]
    z, tau = weight[exact] @ values[exact], weight[exact].sum()
    slots, mu = (x[row, head] for x in store.chosen[0].reservoir)
    for position in slots.tolist():
        z += mu / (len(slots) * values[position].square().sum()) * weight[position] * values[position]
    for members, named in zip(
        store.chosen[0].clusters.members[row, head], store.chosen[0].clusters.slots[row, head], strict=True
    ):
        tau += members / len(named) * weight[named.tolist()].sum() if members else 0.0
    return z / tau


@pytest.mark.parametrize("options", ["delta=9", "budget=120", "budget=2000,slots=1"])
def test_attention_is_the_algorithms_estimate(options):
    keys, values = tokens(400, B=2, D=32)
    policy = f"subgen:variant=stream,recent=20,exact=fp32,{options}"
    store = LayerStore(Recipe.parse(f"{policy}+exact:dtype=fp32").plan(0, 1), keys, values)
    assert store.estimates
    padding = torch.tensor([60, 0])
    for start, stop in [(0, 200), *((i, i + 1) for i in range(200, 300)), (300, 400)]:
        store.append(keys[:, :, start:stop], values[:, :, start:stop], padding if store.deferred else None)
    query = torch.randn(2, 4, 1, 32, generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(400) >= padding[:, None])[:, None]
    got = attend_store(store, AttentionCall(query, mask, 0.125))
    torch.testing.assert_close(got, attend_store(store, AttentionCall(query, None, 0.125)))
    stream = 400 - store.recent.tokens - store.policy.sinks
    assert store.chosen[0].clusters.members.sum(-1).tolist() == [[stream - 60] * 2, [stream] * 2]
    for row, pad in enumerate(padding.tolist()):
        for head in range(4):
            expected = by_slots(store, keys, values, query[row, head, 0], pad, row, head // 2)
            torch.testing.assert_close(got[row, 0, head], expected.float(), atol=2e-4, rtol=2e-3)


def test_a_chunk_sees_the_estimate_and_itself():
    """A chunk's own tokens are exact in both sums. With everything in the window it is exact
    attention."""
    keys, values = tokens(90, D=32)
    query = torch.randn(1, 4, 30, 32)
    call = AttentionCall(query, None, 0.125)
    outs = []
    for policy in ("window:exact=fp32", "subgen:variant=stream,recent=60,sinks=0,budget=100,exact=fp32"):
        store = LayerStore(Recipe.parse(f"{policy}+exact:dtype=fp32").plan(0, 1), keys, values)
        store.append(keys[:, :, :60], values[:, :, :60])
        outs.append(attend_chunk(store, keys[:, :, 60:], values[:, :, 60:], call))
    torch.testing.assert_close(outs[1], outs[0])


def test_a_refused_append_changes_no_sketch():
    keys, values = tokens(400, D=32)
    store = LayerStore(Recipe.parse("subgen:variant=stream,recent=16,exact=fp32+kivi:bits=1").plan(0, 1), keys, values)
    with pytest.raises(UserError, match="scales=bf16"):
        store.append(keys, values * 1e5)
    assert (store.num_tokens, store.chosen[0].reservoir, store.footprint().total_bytes) == (0, None, 0)
    store.append(keys, values)
    call = AttentionCall(torch.randn(1, 4, 1, 32, generator=torch.Generator().manual_seed(2)), None, 0.125)
    before = attend_store(store, call)
    with pytest.raises(UserError, match="scales=bf16"):
        store.append(keys, values * 1e5)
    assert store.num_tokens == 400
    assert torch.equal(attend_store(store, call), before)
