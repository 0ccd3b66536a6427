"""The option `rest` of policies that evict: tokens of lower rank are demoted before they are evicted."""

from __future__ import annotations

import copy

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.recipe import Recipe
from test_claims_selection import check_attention, check_padding, feed, filled, held_by_position, kept, made
from test_store import tokens

POLICIES = [
    "streaming:budget=200,recent=16,rest=2",
    "h2o:budget=200,recent=16,rest=2",
    "snapkv:budget=200,recent=16,rest=2,rest_share=0.7",
    "subgen:budget=200,recent=16,rest=2",
]
CODECS = [
    "kivi:bits=4",
    "uniform:bits=4/turboquant:bits=4",
    "trellis:bits=4,calibration=prompt,centre=false",
]
CALLS = [300, *range(301, 380), 480]


def lower_positions(store: LayerStore, row: int = 0, head: int = 0) -> set[int]:
    """Return the positions of tokens at the lower rate."""
    return set(store.chosen[0].positions(1)[row, head].tolist()) - {-1}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("q", "backend"), [(1, "auto"), (1, "reference"), (300, "auto")])
def test_attention_is_over_kept_tokens_of_both_rates(policy, codec, q, backend):
    store, *_ = filled(f"{policy}+{codec}", CALLS, B=2)
    assert len(store.tiers) == 2
    assert all(tier.tokens for tier in store.tiers)
    check_attention(store, q, backend)


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_tokens_are_those_of_the_policy_alone(policy):
    """Tokens that stay do not depend on the second rate if the codecs of both are nearly exact."""
    two, *_ = filled(f"{policy.replace('rest=2', 'rest=7')}+uniform:bits=8", [300])
    one, *_ = filled(f"{policy.split(',rest')[0]}+uniform:bits=8", [300])
    for head in range(2):
        assert kept(two, 0, head) == kept(one, 0, head)
    shares = [int((two.chosen[0].positions(i) >= 0).sum(-1).max()) for i in range(2)]
    share = 0.7 if "0.7" in policy else 0.5
    assert shares[1] == min(int(200 * share), sum(shares) - 4)


def test_streaming_demotes_the_oldest():
    """From old to new: evicted, low rate, the codec's rate. Errors are those of the rates."""
    store, keys, values, _ = filled("streaming:budget=200,recent=16,rest=2+kivi:bits=4", CALLS)
    low = sorted(lower_positions(store))
    assert kept(store) == [0, 1, 2, 3, *range(480 - 196, 480)]
    assert low == list(range(480 - 196, 480 - 196 + len(low)))
    assert 100 - 32 <= len(low) <= 100
    for held, x in zip(held_by_position(store), (keys, values), strict=True):
        error = (held - x).square().mean(-1)[0, 0]
        packed = list(range(low[-1] + 1, 430))
        assert 6 < float(error[low].mean() / error[packed].mean()) < 60


def test_demoted_tokens_do_not_return():
    """Under H2O a token of the lower rate keeps its bits until it is evicted."""
    keys, values = tokens(500, D=32)
    query = torch.randn(1, 4, 500, 32, generator=torch.Generator().manual_seed(1))
    store = made("h2o:budget=200,recent=16,rest=2+kivi:bits=4", keys, values)
    seen: set[int] = set()
    for start, stop in [(0, 300), *((i, i + 1) for i in range(300, 420)), (420, 500)]:
        feed(store, *(x[:, :, start:stop] for x in (keys, values, query)))
        now = lower_positions(store)
        high = set(store.chosen[0].positions(0)[0, 0].tolist())
        assert not high & seen
        assert len(kept(store)) <= 200
        seen |= now
    assert len(seen) > 150


def test_copies_pickles_and_rows(tmp_path):
    store, keys, values, query = filled(f"{POLICIES[1]}+{CODECS[2]}", CALLS[:40], B=3)
    call = AttentionCall(query[:, :, -1:], None, 0.125)
    want = attend_store(store, call)
    tables = len({x.data_ptr() for x in store.tables()})
    twin = copy.deepcopy(store)
    torch.save(store, tmp_path / "store")
    loaded = torch.load(tmp_path / "store", weights_only=False)
    fresh = made(f"{POLICIES[1]}+{CODECS[2]}", keys, values)
    fresh.restore(store.state())
    for other in (twin, loaded, fresh):
        assert torch.equal(attend_store(other, call), want)
        assert len({x.data_ptr() for x in other.tables()}) == tables
        feed(other, *(x[:, :, :40] for x in (keys, values, query)))
    assert kept(twin, 1) == kept(loaded, 1) == kept(fresh, 1)
    rows = torch.tensor([2, 0])
    store.select(rows)
    call = AttentionCall(query[rows][:, :, -1:], None, 0.125)
    torch.testing.assert_close(attend_store(store, call), want[rows])
    store.crop(store.num_tokens)
    feed(store, *(x[rows] for x in (keys, values, query)))
    assert all(tier.tokens for tier in store.tiers)


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_padded_rows_equal_rows_alone(policy):
    check_padding(f"{policy}+uniform:bits=4", 300)


@pytest.fixture
def uninitialised_is_nan():
    """Fill uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_is_nan")
def test_empty_slots_are_finite():
    """A row with padding demotes fewer tokens. Its empty slots are read with weight 0, which turns no NaN into 0."""
    keys, values = tokens(300, B=2, D=32)
    keys[:, :, :129] += 3  # these get most attention, so the packed tokens stay and newer ones are demoted
    query = torch.ones(2, 4, 300, 32)
    store = made("h2o:budget=436,heavy=1,recent=16,rest=2+kivi:bits=4", keys, values)
    for start, stop in [(0, 129), (129, 300)]:
        feed(store, *(x[:, :, start:stop] for x in (keys, values, query)), torch.tensor([77, 0]))
    assert len(lower_positions(store, 0)) < len(lower_positions(store, 1))
    assert torch.isfinite(attend_store(store, AttentionCall(query[:, :, -1:], None, 0.125))).all()


def test_a_refused_append_changes_nothing():
    store, keys, values, query = filled("h2o:budget=200,recent=16,exact=fp32,rest=2+kivi:bits=4", [300])
    before, held = kept(store), held_by_position(store)
    low = lower_positions(store)
    with pytest.raises(UserError, match="scales=bf16"):
        feed(store, *(x[:, :, :200] * scale for x, scale in ((keys, 1), (values, 1e6), (query, 1))))
    assert (store.num_tokens, kept(store), lower_positions(store)) == (300, before, low)
    for a, b in zip(held_by_position(store), held, strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_exact_layers_have_one_rate():
    recipe = Recipe.parse("h2o:budget=64,rest=2+kivi:bits=4;0=exact")
    keys, values = tokens(100)
    assert LayerStore(recipe.plan(0, 2), keys, values).tiers[1:] == []
    assert LayerStore(recipe.plan(1, 2), keys, values).tiers[1:]


@pytest.mark.parametrize("policy", ["h2o", "streaming", "snapkv", "pyramidkv"])
def test_a_model_generates(llama, policy):
    recipe = f"{policy}:budget=160,recent=16,rest=2+trellis:bits=4,calibration=prompt"
    with torch.no_grad(), tersekv.compress(llama, recipe):
        cache = tersekv.CompressedCache(llama, recipe)
        out = llama.generate(prompt(400), past_key_values=cache, max_new_tokens=40, do_sample=False)
        more = llama.generate(
            torch.cat([out, prompt(50)], dim=1), past_key_values=cache, max_new_tokens=5, do_sample=False
        )
    assert more.shape[1] == 495
    assert all(tier.tokens for tier in cache.layers[0].store.tiers)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("h2o:rest=-1+kivi:bits=4", "rest=-1 is not allowed"),
        ("h2o:rest=4+kivi:bits=4", "rest=4 must be lower than the codec's bits=4"),
        ("h2o:rest=2,rest_share=1+kivi:bits=4", "rest_share=1 is not allowed"),
        ("h2o:rest=2+qjl", "cannot code tokens at several rates"),
        ("subgen:variant=stream,rest=2+kivi:bits=4", "rest=2 does not work with variant=stream"),
    ],
)
def test_refused(recipe, reason):
    with pytest.raises(UserError, match=reason):
        Recipe.parse(recipe)


@pytest.mark.parametrize("codec", ["trellis:bits=4,calibration=prompt,centre=false", "polarquant", "exact"])
def test_tokens_are_moved_together_unchanged(codec):
    """Layouts that can move tokens keep few empty slots, and every token keeps its bits."""
    keys, values = tokens(900, D=32)
    query = torch.randn(1, 4, 900, 32, generator=torch.Generator().manual_seed(1))
    store = made(f"h2o:budget=300,recent=16,evict=block+{codec}", keys, values)
    known: dict[tuple[int, int], torch.Tensor] = {}
    for start, stop in [(0, 500), *((i, i + 1) for i in range(500, 800)), (800, 900)]:
        feed(store, *(x[:, :, start:stop] for x in (keys, values, query)))
        if start % 40 and stop != 900:
            continue
        for segment in store.packed_pages():
            with backends.forced("reference"):  # compiled loops may round by a token's place in them
                decoded = segment.keys.decode()
            for head in range(2):
                for slot, position in enumerate(segment.where[0, head].tolist()):
                    if position >= 0:
                        token = decoded[0, head, slot]
                        assert torch.equal(known.setdefault((head, position), token), token)
    assert len(known) > 500
    assert store.packed_tokens <= 1.125 * (300 - 16) + 64
