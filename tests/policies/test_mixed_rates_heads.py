"""The policy `mixed` with rates of each KV head, so that heads have different numbers of tokens at each rate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tersekv.attention.observe import observe
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.cache.parallel import HeadShard
from tersekv.cache.segments import Observed
from tersekv.codecs import Codec
from tersekv.errors import CacheError, UserError
from tersekv.kernels import backends
from tersekv.policies.mixed import KEPT
from tersekv.transforms.rope import standard_rope
from test_mixed_rates import OPTIONS, RATES, TRELLIS, D, G, H, fed, made, mask_of, normal, store_of


def test_heads_have_rates_and_shares_of_their_own():
    """Each rate has a tier, in which heads have different numbers of blocks. Nothing is held for empty ones."""
    keys, values, query = made(1, 1060)
    store = fed(f"{OPTIONS},bias_correction=full+{TRELLIS}", (keys, values, query), [0, 1060], rates=RATES)
    assert [tier.keys.codec.bits for tier in store.tiers] == [4, 3, 2, 1]
    assert [tier.blocks.tolist() for tier in store.tiers] == [[[8, 0]], [[0, 20]], [[0, 12]], [[24, 0]]]
    error = (store.decoded(torch.float32)[0] - keys)[0, :, 4:1028].square().mean(-1)
    high = store.ranked[0].is_high()[0]
    means = [float(error[h][high[h] == value].mean()) for h in range(H) for value in (True, False)]
    for bits, mean in zip(RATES[:, :2].flatten().tolist(), means, strict=True):
        assert 0.7 < mean / Codec.expected_error(bits) < 1.5
    codes = sum((blocks * bits).sum() for blocks, bits in ((torch.tensor([8, 24]), torch.tensor([4, 1])),
                                                          (torch.tensor([20, 12]), torch.tensor([3, 2]))))  # fmt: skip
    assert store.footprint().parts["codes"] == int(codes) * 32 * 2 * D / 8
    assert all(side.packed.capacity == len(side.packed) for tier in store.tiers for side in tier.sides)
    for tier in store.tiers:  # heads without tokens of a rate have no correction of it, and nothing is held for them
        assert torch.equal(tier.keys.correction[0].any(-1), tier.blocks[0] > 0)
        assert tier.keys.lost.shape == (1, 1, D)
    shard = HeadShard(1, 1, H, lambda x: x)
    other = LayerStore(store.plan, keys[:, 1:, :0], values[:, 1:, :0], None, standard_rope(D), shard)
    other.append(keys[:, 1:], values[:, 1:], None, Observed(importance=normal(1, 1, 1060)))
    assert [(tier.keys.codec.bits, tier.blocks.tolist()) for tier in other.tiers] == [(3, [[20]]), (2, [[12]])]


@pytest.mark.parametrize("padding", [None, [0, 37, 5]], ids=["alike", "padded"])
def test_heads_with_their_own_rates_are_selected_copied_and_restored(padding: list[int] | None):
    tokens, recipe = made(3, 700), f"{OPTIONS},bias_correction=full+{TRELLIS}"
    store = fed(recipe, tokens, [0, 400, *range(401, 530), 700], padding, RATES)
    query, mask = normal(3, H * G, 1, D, seed=9), mask_of(699, 1, padding)
    out = attend_store(store, AttentionCall(query, mask, 0.3))
    with backends.forced("reference"):
        torch.testing.assert_close(attend_store(store, AttentionCall(query, mask, 0.3)), out, rtol=0, atol=2e-3)
    other = store_of(tokens[0], recipe, RATES)
    other.restore(store.state())
    assert torch.equal(attend_store(other, AttentionCall(query, mask, 0.3)), out)
    rows = torch.tensor([2, 0, 0])
    copied = copy.deepcopy(store)
    copied.select(rows)
    part = AttentionCall(query[rows], None if mask is None else mask[rows], 0.3)
    torch.testing.assert_close(attend_store(copied, part), out[rows])
    for s in (store, other):  # both go on alike
        for i in range(200):
            s.append(*(normal(3, H, 1, D, seed=i + j) for j in (3, 4)), observed=Observed(importance=torch.rand(
                3, H, s.recent.tokens + 1, generator=torch.Generator().manual_seed(i))))  # fmt: skip
    assert store.packed_tokens > 700
    assert torch.equal(*(s.decoded(torch.float32)[0] for s in (store, other)))
    with pytest.raises(CacheError, match="under the policy mixed"):
        store.crop(300)
    broken = other.state()
    broken["tiers"][0]["slots"][0]["counts"][0][0, 0] += 1
    with pytest.raises(UserError, match="slots"):
        store_of(tokens[0], recipe, RATES).restore(broken)
    store.crop(900)
    assert store.num_tokens == store.packed_tokens == sum(tier.tokens for tier in store.tiers) == 0


@pytest.mark.parametrize(("bits", "rest", "share"), [(8, 0.25, 1 / 32), (1.75, 0.5, 0.28), (6, 2.75, 0.5)])
def test_attention_reads_rates_far_apart(bits: float, rest: float, share: float):
    """Rates that `allot=model` gives to layers."""
    recipe = f"mixed:budget={share},rest={rest},bias_correction=full+trellis:bits={bits},calibration=prompt"
    store = fed(recipe, made(1, 1000), [0, 700, *range(701, 1000)])
    assert (store.keys.packed.tokens < store.tiers[1].keys.packed.tokens) == (share < 0.5)
    call = AttentionCall(normal(1, H * G, 1, D, seed=9), None, 0.3)
    with backends.forced("reference"):
        wanted = attend_store(store, call)
    torch.testing.assert_close(attend_store(store, call), wanted, rtol=0, atol=2e-3)


def test_positions_take_one_bit_per_token():
    store = fed(f"{OPTIONS}+{TRELLIS}", made(1, 1060), [0, 1060])
    assert store.packed_tokens == 1024
    footprint = store.footprint()
    queries = H * G * KEPT * D * 2
    assert footprint.parts["selection"] == H * 1024 / 8 + queries
    assert footprint.parts["codes"] == H * 2 * D * 1024 * 2.5 / 8


def test_the_basis_of_all_rates_is_inverted_once(monkeypatch: pytest.MonkeyPatch):
    """Also in later calls, and in a store that was restored."""
    tokens, recipe, inverted = made(1, 1400), f"{OPTIONS}+{TRELLIS}", backends.search_arguments
    calls: list[Any] = []
    monkeypatch.setattr(backends, "search_arguments", lambda *of: calls.append(of) or inverted(*of))
    store = fed(recipe, tokens, [0, 700, 1400], rates=RATES)
    assert len(store.tiers) == 4
    assert len(calls) == 4  # of keys and values, in two calls
    other = store_of(tokens[0], recipe, RATES)
    other.restore(store.state())
    part = tokens[0][:, :, :512], tokens[1][:, :, :512]
    other.append(*part, None, observe(other, *part, AttentionCall(tokens[2][:, :, :512], None, 0.3)))
    assert len(calls) == 6
