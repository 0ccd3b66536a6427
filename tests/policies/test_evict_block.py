"""The option `evict=block`: a block of tokens leaves at once, and its queries are observed together."""

from __future__ import annotations

import copy

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.attention import observe as observing
from tersekv.errors import UserError
from tersekv.recipe import Recipe
from test_claims_selection import check_attention, feed, filled, kept, made
from test_store import tokens

ROOMY = "h2o:budget=2000,recent=16"


def votes_by_position(store) -> torch.Tensor:
    """Return the votes of each token, float32 [B, H, num_tokens]."""
    votes = torch.zeros(store.batch_size, store.kv_heads, store.num_tokens)
    for slots in (held.slots for held in store.chosen[0].slots):
        votes.scatter_add_(2, slots.positions.clamp(min=0).long(), slots.fields["votes"] * slots.alive)
    tail = store.num_tokens - store.recent.tokens
    votes[:, :, tail : tail + store.chosen[0].tail_votes.shape[2]] = store.chosen[0].tail_votes
    return votes


@pytest.mark.parametrize("codec", ["exact:dtype=fp32", "kivi:bits=4"])
@pytest.mark.parametrize("padding", [None, torch.tensor([37, 0])], ids=["alike", "padded"])
def test_votes_are_those_of_single_steps(codec, padding):
    """Nothing is evicted, so both add up the same attention, also over a second prompt."""
    cuts, held = [200, *range(201, 301), 305, 340], []
    for evict in ("step", "block"):
        store, *_ = filled(f"{ROOMY},exact=fp32,evict={evict}+{codec}", cuts, B=2, padding=padding)
        held.append(votes_by_position(store))
    scale = 1e-5 if codec.startswith("exact") else 0.05  # a token may be packed a few steps later
    torch.testing.assert_close(held[1], held[0], rtol=scale, atol=scale)


def test_attention_is_observed_once_per_block(monkeypatch):
    calls = []
    original = observing._weights
    monkeypatch.setattr(observing, "_weights", lambda *args: calls.append(args) or original(*args))
    store, *_ = filled("h2o:budget=100,recent=16,evict=block+kivi:bits=4", [200])
    calls.clear()
    keys, values = tokens(200, D=32)
    query = torch.randn(1, 4, 200, 32)
    for i in range(96):
        feed(store, *(x[:, :, i : i + 1] for x in (keys, values, query)))
        assert len(kept(store)) <= 100 + 31
    assert len(calls) == 3


@pytest.mark.parametrize(
    "policy", ["h2o:budget=100,recent=16", "streaming:budget=100,recent=16", "h2o:budget=100,rest=2"]
)
def test_attention_is_over_kept_tokens(policy):
    store, *_ = filled(f"{policy},evict=block+kivi:bits=4", [200, *range(201, 280), 330], B=2)
    check_attention(store, 1)


def test_streaming_keeps_the_latest():
    store, *_ = filled("streaming:budget=100,recent=16,evict=block+exact", [200, *range(201, 250)])
    now = kept(store)
    assert now[:4] == [0, 1, 2, 3]
    assert now[4:] == list(range(now[4], 249))
    assert 100 <= len(now) <= 131


def test_rollback_copies_and_a_refused_append():
    recipe = "h2o:budget=100,recent=16,evict=block+exact:dtype=fp32"
    store, keys, values, query = filled(recipe, [200, *range(201, 211)])
    twin = copy.deepcopy(store)
    fresh = made(recipe, keys, values)
    fresh.restore(store.state())
    for i in range(3):  # rejected proposals leave no votes
        feed(store, *(x[:, :, i : i + 1] for x in (keys, values, query)))
    store.crop(3)
    with pytest.raises(Exception, match="NaN or Inf"):
        feed(store, keys[:, :, :1] * torch.nan, values[:, :, :1], query[:, :, :1])
    for other in (store, twin, fresh):
        for i in range(10, 60):
            feed(other, *(x[:, :, i : i + 1] for x in (keys, values, query)))
    for other in (store, fresh):
        torch.testing.assert_close(votes_by_position(other), votes_by_position(twin))
        assert kept(other) == kept(twin)


def test_bytes_count_the_kept_queries():
    store, *_ = filled("h2o:budget=100,recent=16,evict=block+kivi:bits=4", [200, *range(201, 211)])
    figures = [
        store.chosen[0].positions(0),
        *(x for held in store.chosen[0].slots for x in held.slots.fields.values()),
        store.chosen[0].tail_votes,
        store.chosen[0].queries,
    ]
    assert store.chosen[0].queries.shape == (1, 4, 10, 32)
    assert store.footprint().parts["selection"] == sum(x.nbytes for x in figures)


@pytest.mark.parametrize("policy", ["h2o:budget=160,recent=16", "streaming:budget=96"])
def test_a_model_generates(llama, policy):
    recipe = f"{policy},evict=block+uniform:bits=4"
    with torch.no_grad(), tersekv.compress(llama, recipe):
        cache = tersekv.CompressedCache(llama, recipe)
        out = llama.generate(prompt(300), past_key_values=cache, max_new_tokens=80, do_sample=False)
        again = llama.generate(
            torch.cat([out, prompt(50)], dim=1), past_key_values=cache, max_new_tokens=5, prompt_lookup_num_tokens=3
        )
    assert again.shape[1] == 435


def test_unknown_value():
    with pytest.raises(UserError, match="evict=never is not allowed; choose one of step, block"):
        Recipe.parse("h2o:evict=never+exact")
