"""Stores that keep only some tokens: attention reads only these, padding has no effect, and their
size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tersekv.attention import observe as observing
from tersekv.attention.observe import kept_weights, observe
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import UNSEEN, Observed
from tersekv.errors import CacheError, UserError
from tersekv.recipe import Recipe
from test_attention import check, dense
from test_claims_selection import check_attention, check_padding, feed, filled, held_by_position, kept, made, masks_of
from test_store import tokens

POLICIES = [
    "streaming:budget=100,recent=16",
    "h2o:budget=100,recent=16",
    "snapkv:budget=100,recent=16",
    "snapkv:budget=100,recent=16,window=8,pool=max",
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("codec", ["kivi:bits=4", "qjl", "exact", "uniform:axis=channel,group=0"])
@pytest.mark.parametrize(("q", "backend"), [(1, "auto"), (1, "reference"), (5, "auto"), (300, "auto")])
def test_attention_is_over_kept_tokens(policy, codec, q, backend):
    store, *_ = filled(f"{policy}+{codec}", [200, *range(201, 280), 330], B=2)
    check_attention(store, q, backend, codec == "qjl")


def test_masks_hide_kept_positions():
    """A random mask over all positions applies to the kept ones, in whichever head they are."""
    store, *_ = filled("h2o:budget=100,recent=16+kivi:bits=4", [200, *range(201, 240)], B=2)
    keys, values = held_by_position(store)
    query = torch.randn(2, 4, 3, 32)
    mask = torch.rand(2, 3, store.num_tokens, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[1, 2] = False
    call = AttentionCall(query, mask, 0.125)
    got = attend_store(store, call)
    for head in range(2):
        seen = mask & masks_of(store, 3)[:, head]
        expected = dense(query[:, 2 * head : 2 * head + 2], keys[:, head : head + 1].nan_to_num(),
                         values[:, head : head + 1].nan_to_num(), seen, call)  # fmt: skip
        check(got[:, :, 2 * head : 2 * head + 2], expected)
    assert got[1, 2].abs().max() == 0


def test_votes_are_attention_weights_summed(monkeypatch):
    store, *_ = filled("h2o:budget=100,recent=16,sinks=0+exact:dtype=fp32", [200])
    keys, query = torch.randn(1, 2, 90, 32), torch.randn(1, 4, 90, 32)
    call = AttentionCall(query, None, 0.125, 3.0, torch.randn(4))
    votes = observe(store, keys, keys, call).votes
    weights = kept_weights(store, keys, call)
    assert votes.shape == (1, 2, 100 + 90)
    expected = weights.sum(2).unflatten(1, (2, 2)).mean(2)
    for head in range(2):
        places = [*store.chosen[0].positions(0)[0, head].tolist(), *range(200 - 16, 290)]
        torch.testing.assert_close(votes[0, head], expected[0, head, places])
        assert expected[0, head].sum() == pytest.approx(float(votes[0, head].sum()), rel=1e-5)
    alive = []
    original = observing._weights

    def watch(*args):
        alive.append(original(*args))
        assert alive[-1].shape[3] <= 16
        return alive[-1]

    monkeypatch.setattr(observing, "OBSERVED_QUERIES", 16)
    monkeypatch.setattr(observing, "_weights", watch)
    torch.testing.assert_close(observe(store, keys, keys, call).votes, votes)
    assert len(alive) == 6


def test_nothing_is_observed_for_others(monkeypatch):
    def fail(*args):
        raise AssertionError("attention weights were made")

    monkeypatch.setattr(observing, "_weights", fail)
    filled("streaming+kivi", [200, 201])
    keys, values = tokens(100)
    window = LayerStore(Recipe.parse("h2o+kivi").plan(0, 1), keys, values, 48)
    assert isinstance(window, LayerStore)
    assert observe(window, keys, keys, AttentionCall(torch.randn(1, 4, 100, 64), None, 0.125)) is UNSEEN


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("codec", ["kivi:bits=4", "qjl:outliers=0"])
def test_padded_rows_equal_rows_alone(policy, codec):
    check_padding(f"{policy}+{codec}", 200)


def test_padding_longer_than_the_first_chunk():
    """The contents of padding have no effect, although the first chunk is all padding for one row."""
    outs = []
    for filling in (0.0, 50.0):
        keys, values = tokens(300, B=2, D=32)
        query = torch.randn(2, 4, 300, 32, generator=torch.Generator().manual_seed(1))
        for x in (keys, values, query):
            x[0, :, :90] = filling
        store = made("snapkv:recent=16,budget=100+uniform:axis=channel,group=0", keys, values)
        for start, stop in [(0, 64), (64, 128), (128, 300)]:
            feed(store, *(x[:, :, start:stop] for x in (keys, values, query)), torch.tensor([90, 0]).clamp(max=stop))
        assert kept(store)[0] == 90
        outs.append(attend_store(store, AttentionCall(torch.ones(2, 4, 1, 32), None, 0.125)))
    assert torch.equal(*outs)


@pytest.mark.parametrize("policy", POLICIES)
def test_footprint_counts_the_tensors_held(policy):
    store, *_ = filled(f"{policy}+kivi:bits=4", [200, *range(201, 290)], B=2)
    footprint = store.footprint()
    planes = [x for side in store.sides for page in side.packed.pages for x in page.planes.values()]
    fields = [x for held in store.chosen[0].slots for x in held.slots.fields.values()]
    figures = [store.chosen[0].positions(0), *fields, store.chosen[0].tail_votes]
    held = [*planes, *store.recent.buffers, *figures, *store.chosen[0].loose[0].data]
    assert footprint.total_bytes == sum(x.numel() * x.element_size() for x in held)
    assert footprint.parts["selection"] == sum(x.numel() * x.element_size() for x in figures)
    assert footprint.parts["exact sinks"] == 2 * 2 * 4 * 32 * 2 * 2


@pytest.mark.parametrize("codec", ["kivi:bits=2", "qjl"])
def test_memory_stays_bounded_while_decoding(codec):
    """Empty slots in packed blocks are at most half of the budget plus two blocks.

    No head loses much by this.
    """
    store, *_ = filled(f"h2o:budget=160,recent=16+{codec}", [200, *range(201, 900)])
    assert store.packed_tokens <= 1.5 * (160 - 16) + 64
    for head in range(2):
        assert 120 < len(kept(store, 0, head)) <= 160


@pytest.mark.parametrize("policy", ["h2o:budget=160,recent=16", "snapkv:budget=160", "subgen:budget=160,recent=16"])
def test_packed_bits_do_not_change(policy):
    """A token's decoded bits stay those it was packed with, whatever is evicted around it."""
    keys, values = tokens(500, D=32)
    query = torch.randn(1, 4, 500, 32)
    store = made(f"{policy}+kivi:bits=2", keys, values)
    known: dict[tuple[int, int], Tensor] = {}
    for start, stop in [(0, 300), *((i, i + 1) for i in range(300, 420)), (420, 500)]:
        feed(store, *(x[:, :, start:stop] for x in (keys, values, query)))
        packed = store.packed_segment()
        decoded = packed.keys.decode()
        for head in range(2):
            for slot, position in enumerate(packed.where[0, head].tolist()):
                if position >= 0:
                    token = decoded[0, head, slot]
                    assert torch.equal(known.setdefault((head, position), token), token)
    assert len(known) > 200


def test_a_refused_append_changes_nothing():
    recipe = "snapkv:budget=300,recent=16,exact=fp32+kivi:bits=1"
    store, keys, values, query = filled(recipe, [200])
    before, held = kept(store), held_by_position(store)
    with pytest.raises(UserError, match="scales=bf16"):
        feed(store, keys, values * 1e5, query)
    assert (store.num_tokens, kept(store)) == (200, before)
    for a, b in zip(held_by_position(store), held, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    with pytest.raises(CacheError, match="NaN or Inf"):
        feed(store, keys, values * torch.nan, query)
    assert store.num_tokens == 200


def test_crop_select_and_copy():
    store, keys, values, query = filled("snapkv:budget=100,recent=16+kivi:bits=4", [200, *range(201, 211)], B=3)
    held = store.recent.tokens
    twin = copy.deepcopy(store)
    feed(store, *(x[:, :, :5] for x in (keys, values, query)))
    store.crop(5)
    assert kept(store) == kept(twin)
    with pytest.raises(CacheError, match=f"can roll back the latest {held} "):
        store.crop(held + 1)
    with pytest.raises(CacheError, match="only 210 were seen"):
        store.crop(211)
    rows = torch.tensor([2, 0, 2])
    store.select(rows)
    for new, old in enumerate(rows.tolist()):
        assert kept(store, new, 1) == kept(twin, old, 1)
    store.crop(210)
    assert (store.num_tokens, store.footprint().total_bytes) == (0, 0)
    feed(store, keys, values, query)
    assert len(kept(store)) == 100


def test_without_observed_attention():
    keys, values = tokens(100)
    with pytest.raises(UserError, match="read by tersekv's attention only"):
        made("snapkv+kivi", keys, values).append(keys, values)
    with pytest.raises(UserError, match="read by tersekv's attention only"):
        filled("streaming+kivi", [100])[0].decoded(torch.float32)


def test_a_refused_first_call_leaves_no_padding():
    keys, values = tokens(200, B=2)
    store = made("snapkv:recent=16,exact=fp32,budget=0.5+exact:dtype=fp16", keys, values)
    with pytest.raises(UserError, match="exceeds float16's 65504"):
        store.append(keys * 1e6, values, torch.tensor([0, 7]), Observed(torch.ones(2, 2, 200)))
    assert store.padding is store.chosen[0].padding is None
