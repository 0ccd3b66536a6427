"""Stores that keep only some tokens: the kept tokens of each policy, and unusual budgets."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tersekv.attention.observe import observe
from tersekv.attention.read import AttentionCall, attend_chunk, attend_store
from tersekv.cache.candidates import best
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import PackedSegment
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.policies.pyramidkv import PyramidKV
from tersekv.policies.snapkv import SnapKV
from tersekv.recipe import Recipe
from test_attention import check, dense
from test_store import tokens

EXACT = "exact:dtype=fp32"


def made(recipe: str, keys: Tensor, values: Tensor, layer: int = 0, layers: int = 1) -> LayerStore:
    store = LayerStore(Recipe.parse(recipe).plan(layer, layers), keys, values)
    assert store.by_head
    return store


def feed(store: LayerStore, keys: Tensor, values: Tensor, query: Tensor, padding: Tensor | None = None) -> None:
    """Observe and append tokens [B, H, n, D] with their queries [B, Hq, n, D], as a model's
    attention does."""
    mask = None
    if padding is not None:
        q, T = query.shape[2], store.num_tokens + query.shape[2]
        visible = torch.arange(T) >= padding[:, None]
        mask = visible[:, None] & (torch.arange(T) <= torch.arange(T - q, T)[:, None])[None]
    store.append(keys, values, padding, observe(store, keys, keys, AttentionCall(query, mask, 0.125)))


def filled(recipe: str, cuts: list[int], B: int = 1, D: int = 32, padding: Tensor | None = None) -> tuple:
    """Fill a store with random tokens in the given pieces. Return it with all keys, values and
    queries."""
    keys, values = (x[:, :, : cuts[-1]] for x in tokens(1000, B=B, D=D))
    query = torch.randn(B, 4, 1000, D, generator=torch.Generator().manual_seed(1))[:, :, : cuts[-1]]
    store = made(recipe, keys, values)
    start = 0
    for stop in cuts:
        feed(store, *(x[:, :, start:stop] for x in (keys, values, query)), padding)
        start = stop
    return store, keys, values, query


def kept(store: LayerStore, row: int = 0, head: int = 0) -> list[int]:
    """Return the kept positions, sorted."""
    positions = torch.cat([held.slots.positions[row, head] for held in store.chosen[0].slots])
    tail = range(store.num_tokens - store.recent.tokens, store.num_tokens)
    return sorted([*positions[positions >= 0].tolist(), *tail])


def masks_of(store: LayerStore, q: int) -> Tensor:
    """Return a mask of kept tokens by position, bool [B, H, q, num_tokens]."""
    mask = torch.zeros(store.batch_size, store.kv_heads, q, store.num_tokens, dtype=torch.bool)
    for b in range(store.batch_size):
        for h in range(store.kv_heads):
            mask[b, h, :, kept(store, b, h)] = True
    return mask


def held_by_position(store: LayerStore) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, H, num_tokens, D] as the store decodes them, NaN for evicted
    tokens."""
    places = torch.arange(store.num_tokens).expand(*store.shape[:2], -1)
    out = [torch.full((*places.shape, side.head_dim), torch.nan) for side in store.sides]
    for segment in store.held():
        at = segment.where if isinstance(segment, PackedSegment) else segment.positions
        for x, held in zip(out, (segment.keys, segment.values), strict=True):
            held = held.float() if isinstance(held, Tensor) else held.decode()
            if isinstance(at, int):
                x[:, :, at : at + held.shape[2]] = held
            else:
                b, h, slot = (at >= 0).nonzero(as_tuple=True)
                x[b, h, at[b, h, slot].long()] = held[b, h, slot]
    return out[0], out[1]


def check_attention(store: LayerStore, q: int, backend: str = "auto", noisy: bool = False) -> None:
    """Check attention of q new tokens in a batch of two: each KV head reads its own kept tokens, and the new ones.

    noisy: the codec estimates scores.
    """
    keys, values = held_by_position(store)
    query = torch.randn(2, 4, q, 32, generator=torch.Generator().manual_seed(2))
    own = torch.randn(2, 2, 2, q, 32, generator=torch.Generator().manual_seed(3))
    call = AttentionCall(query, None, 0.125)
    with backends.forced(backend):
        got = attend_chunk(store, own[0], own[1], call)
    held = masks_of(store, q)
    assert not held.all()
    mask = torch.cat([held, torch.ones(q, q, dtype=torch.bool).tril().expand(2, 2, -1, -1)], dim=3)
    for head in range(2):
        parts = [
            torch.cat([x[:, head : head + 1].nan_to_num(), o[:, head : head + 1]], 2)
            for x, o in ((keys, own[0]), (values, own[1]))
        ]
        expected = dense(query[:, 2 * head : 2 * head + 2], *parts, mask[:, head], call)
        check(got[:, :, 2 * head : 2 * head + 2], expected, noisy)


def check_padding(recipe: str, first: int) -> None:
    """Check that rows of different lengths in one batch keep the same tokens as alone, at shifted positions.

    A call of `first` tokens is followed by 60 of one token and one of 40.
    """
    cuts = [0, *range(first, first + 61), first + 100]
    keys, values = tokens(cuts[-1], B=2, D=32)
    query = torch.randn(2, 4, cuts[-1], 32, generator=torch.Generator().manual_seed(1))
    padding = torch.tensor([77, 0])
    together = made(recipe, keys, values)
    for start, stop in pairwise(cuts):
        feed(together, *(x[:, :, start:stop] for x in (keys, values, query)), padding)
    for row, pad in enumerate(padding.tolist()):
        alone = made(recipe, *(x[row : row + 1, :, pad:] for x in (keys, values)))
        for start, stop in pairwise([pad, *cuts[1:]]):
            feed(alone, *(x[row : row + 1, :, start:stop] for x in (keys, values, query)))
        for head in range(2):
            assert [p - pad for p in kept(together, row, head)] == kept(alone, 0, head)


def test_streaming_keeps_first_and_latest():
    store, *_ = filled(f"streaming:budget=100,recent=16+{EXACT}", [300])
    assert kept(store) == [0, 1, 2, 3, *range(204, 300)]
    store, *_ = filled(f"streaming:budget=100,recent=16+{EXACT}", [300, *range(301, 401)])
    assert kept(store) == [0, 1, 2, 3, *range(304, 400)]


def test_streaming_frees_blocks():
    store, *_ = filled("streaming:budget=100,recent=16+kivi:bits=4", [300, *range(301, 600)])
    assert store.packed_tokens <= 128
    assert len(kept(store)) == 100


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_snapkv_keeps_tokens_with_most_votes(pool):
    """The paper's listing: softmax of the last queries, summed, pooled, top k per head."""
    store, keys, _, query = filled(f"snapkv:budget=80,sinks=0,pool={pool}+{EXACT}", [300])
    window = query[:, :, -32:].unflatten(1, (2, 2))
    scores = window @ keys.unsqueeze(2).transpose(-1, -2) * 0.125
    scores = scores.masked_fill(torch.ones(32, 300, dtype=torch.bool).triu(300 - 32 + 1), -torch.inf)
    votes = scores.softmax(-1)[..., :-32].sum(-2).mean(2)
    pooling = torch.nn.functional.avg_pool1d if pool == "avg" else torch.nn.functional.max_pool1d
    expected = pooling(votes, 7, stride=1, padding=3)
    expected = expected.argsort(dim=-1, descending=True, stable=True)[..., : 80 - 32]
    for head in range(2):
        assert kept(store, 0, head) == sorted([*expected[0, head].tolist(), *range(268, 300)])
    assert kept(store, 0, 0) != kept(store, 0, 1)


def test_snapkv_keeps_generated_tokens_and_selects_again_at_the_next_prompt():
    recipe = f"snapkv:budget=80,sinks=0+{EXACT}"
    store, *_ = filled(recipe, [300])
    first = kept(store)
    store, *_ = filled(recipe, [300, *range(301, 401)])
    assert kept(store) == [*first, *range(300, 400)]
    store, *_ = filled(recipe, [300, *range(301, 401), 500])
    assert len(kept(store)) == len(kept(store, 0, 1)) == 80
    assert kept(store)[-32:] == list(range(468, 500))
    assert set(kept(store)) & set(first)
    assert set(kept(store)) & set(range(400, 468))


def reference_h2o(keys: Tensor, query: Tensor, prompt: int, budget: int) -> list[int]:
    """Run Algorithm 1 of H2O for one head: scores of all queries so far, half of the budget for
    recent tokens."""
    weights = (query[:prompt] @ keys[:prompt].T * 0.125).masked_fill(
        torch.ones(prompt, prompt, dtype=torch.bool).triu(1), -torch.inf
    )
    scores = dict(enumerate(weights.softmax(-1).sum(0).tolist()))
    for step in range(prompt, len(keys) + 1):
        recent = range(step - budget // 2, step)
        heavy = sorted((t for t in scores if t not in recent), key=lambda t: -scores[t])[: budget - budget // 2]
        scores = {t: scores[t] for t in sorted([*heavy, *recent])}
        if step < len(keys):
            scores[step] = 0.0
            held = list(scores)
            for t, weight in zip(held, (query[step] @ keys[held].T * 0.125).softmax(-1).tolist(), strict=True):
                scores[t] += weight
    return sorted(scores)


def test_h2o_equals_algorithm_1():
    keys, values = tokens(600, H=1, D=32)
    query = torch.randn(1, 1, 600, 32, generator=torch.Generator().manual_seed(1)) * 2
    store = made(f"h2o:budget=100,sinks=0,recent=10,exact=fp32+{EXACT}", keys, values)
    for start, stop in [(0, 150), *((i, i + 1) for i in range(150, 600))]:
        feed(store, *(x[:, :, start:stop] for x in (keys, values, query)))
    assert kept(store) == reference_h2o(keys[0, 0], query[0, 0], 150, 100)
    assert 32 <= store.packed_tokens <= 1.5 * 90 + 64


def test_pyramid_budgets_fall_and_have_the_same_total():
    for policy in (PyramidKV(budget=400), PyramidKV(budget=0.3), PyramidKV(budget=0.9), PyramidKV(budget=40)):
        budgets = [policy.kept(1000, i, 16) for i in range(16)]
        mean = SnapKV(budget=policy.budget).kept(1000)
        assert budgets == sorted(budgets, reverse=True)
        assert sum(budgets) == pytest.approx(16 * mean, abs=8)
        assert min(budgets) >= 32
        assert max(budgets) <= 1000
    assert PyramidKV(budget=400).kept(1000, 15, 16) == 32
    assert PyramidKV(budget=400, beta=2).kept(1000, 15, 16) == 200
    assert PyramidKV().kept(100, 0, 1) == 25


@pytest.mark.parametrize("name", ["streaming", "h2o", "snapkv", "pyramidkv", "subgen"])
@pytest.mark.parametrize(("budget", "prompt"), [(1, 50), (3, 50), (20, 50), (64, 1), (64, 2), (1000, 50), (0.001, 50)])
def test_odd_budgets(name, budget, prompt):
    """One token, fewer than the sinks, fewer than the window, more than the prompt, prompts of one
    token."""
    if budget == 1:  # the number 1 means the whole prompt
        budget = 1.2
    store, *_, query = filled(f"{name}:budget={budget}+kivi:bits=4", [prompt, *range(prompt + 1, prompt + 8)])
    allowed = max(1, int(budget)) + (7 if store.policy.evicts != "step" else 0)
    for head in range(2):
        assert len(kept(store, 0, head)) <= max(allowed, 8 if prompt < 8 else 0)
        assert kept(store, 0, head)[-1] == prompt + 6
    assert torch.isfinite(attend_store(store, AttentionCall(query[:, :, -1:], None, 0.125))).all()


def test_equal_weights_without_capacity():
    weights, alive = torch.zeros(2, 1, 5), torch.tensor([True, False, True, True, False])[None, None].repeat(2, 1, 1)
    kept = best(weights, alive, torch.tensor([[2], [0]]))
    assert kept.tolist() == [[[True, False, True, False, False]], [[False] * 5]]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("snapkv:budget=0+kivi", "budget=0 is not allowed; give a fraction"),
        ("streaming:budget=-3+kivi", "budget=-3 is not allowed"),
        ("snapkv:kernel=4+kivi", "kernel=4 is not allowed; give an odd number"),
        ("snapkv:window=0+kivi", "window=0 is not allowed"),
        ("snapkv:pool=min+kivi", "choose one of avg, max"),
        ("h2o:heavy=1.5+kivi", "heavy=1.5 is not allowed"),
        ("h2o:score=median+kivi", "choose one of sum, mean"),
        ("pyramidkv:beta=0+kivi", "beta=0 is not allowed"),
    ],
)
def test_wrong_options(recipe, message):
    with pytest.raises(UserError, match=message):
        Recipe.parse(recipe)
