"""The policy `mixed`: tokens of a prompt at two rates, chosen by attention for each KV head."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tersekv.attention.importance import importance, moved
from tersekv.attention.observe import observe
from tersekv.attention.read import AttentionCall, attend_chunk, attend_store, grouped
from tersekv.attention.weights import attention_weights
from tersekv.cache.layer import LayerStore
from tersekv.cache.packing import LOST_BLOCKS
from tersekv.errors import CacheError, UserError
from tersekv.kernels import backends, softmax
from tersekv.kernels.attend import Masks
from tersekv.policies.mixed import EVERY, KEPT
from tersekv.recipe import Recipe
from tersekv.sizes.rate_allotment import with_rates
from tersekv.transforms.rope import standard_rope

H, G, D = 2, 3, 64
OPTIONS = "mixed:budget=0.25,rest=2,sinks=4,recent=32"
TRELLIS = "trellis:bits=4,calibration=prompt"
CODECS = [TRELLIS, "trellis:bits=4,calibration=prompt,pre_rope=true", "kivi:bits=4", "uniform:bits=4/turboquant:bits=4"]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(B: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and queries of n tokens."""
    return normal(B, H, n, D, seed=seed), normal(B, H, n, D, seed=seed + 1), normal(B, H * G, n, D, seed=seed + 2)


def mask_of(first: int, n: int, padding: list[int] | None) -> Tensor | None:
    """Return the mask of n queries from place `first` on."""
    if padding is None:
        return None
    seen = torch.ones(first + n, first + n, dtype=torch.bool).tril()[first:].repeat(len(padding), 1, 1)
    for row, p in enumerate(padding):
        seen[row, :, :p] = False
    return seen


RATES = torch.tensor([[4, 1, 0.25], [3, 2, 0.6]])
"""Rates of two heads that share none."""


def store_of(keys: Tensor, recipe: str, rates: Tensor | None = None) -> LayerStore:
    plan = Recipe.parse(recipe).plan(0, 1)
    plan = plan if rates is None else with_rates(plan, rates)
    store = LayerStore(plan, keys, keys, None, standard_rope(D))
    assert store.ranked
    return store


def fed(
    recipe: str,
    tokens: tuple[Tensor, ...],
    cuts: list[int],
    padding: list[int] | None = None,
    rates: Tensor | None = None,
) -> LayerStore:
    """Return a store that was fed the tokens in calls that end at `cuts`."""
    keys, values, query = tokens
    store = store_of(keys, recipe, rates)
    for a, b in pairwise(cuts):
        part = keys[:, :, a:b], values[:, :, a:b]
        call = AttentionCall(query[:, :, a:b], mask_of(a, b - a, padding), 0.3)
        seen = observe(store, *part, call)
        store.append(*part, None if padding is None else torch.tensor(padding), seen)
    return store


def expected(store: LayerStore, call: AttentionCall) -> Tensor:
    """Return exact attention over the decoded tokens."""
    weights = attention_weights(None, store.decoded(torch.float32)[0], call)
    values = store.decoded(torch.float32)[1].repeat_interleave(G, dim=1)
    return torch.matmul(weights, values).transpose(1, 2)


@pytest.mark.parametrize("rates", [None, RATES], ids=["", "by head"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("padding", [None, [0, 37]], ids=["alike", "padded"])
def test_attention_reads_every_token_at_its_rate(codec: str, padding: list[int] | None, rates: Tensor | None):
    """A prompt, generated tokens and a second prompt; one query and many (decoded block by block)."""
    tokens = made(2, 1000)
    cuts = [0, 600, *range(601, 701), 1000]
    if rates is not None and "/" in codec:
        rates = torch.tensor([[4, 2, 0.25], [3, 2, 0.6]])  # whole bits from 2 on
    store = fed(f"{OPTIONS}+{codec}", tokens, cuts, padding, rates)
    assert store.num_tokens == 1000
    assert store.packed_tokens > 900
    for n in (1, 100):
        query = normal(2, H * G, n, D, seed=9)
        if n == 1:
            call = AttentionCall(query, mask_of(999, 1, padding), 0.3)
            torch.testing.assert_close(attend_store(store, call), expected(store, call), rtol=0, atol=2e-3)
        else:
            keys, values = normal(2, H, n, D, seed=5), normal(2, H, n, D, seed=6)
            call = AttentionCall(query, mask_of(1000, n, padding), 0.3)
            past = store.decoded(torch.float32)
            weights = attention_weights(store, keys, call)
            both = torch.cat([past[1], values], dim=2).repeat_interleave(G, dim=1)
            wanted = torch.matmul(weights, both).transpose(1, 2)
            torch.testing.assert_close(attend_chunk(store, keys, values, call), wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_each_token_is_coded_at_its_rate(codec: str):
    """Tokens of each rate are those that the side's codec of that rate encodes, at their positions."""
    keys, values, query = made(1, 520)
    store = fed(f"{OPTIONS}+{codec}", (keys, values, query), [0, 520])
    high = store.ranked[0].is_high()
    assert high.sum(-1).tolist() == [[128, 128]]  # a quarter of 484 // 32 blocks, rounded up
    assert not torch.equal(high[:, 0], high[:, 1])  # heads choose for themselves
    for x, got in zip((keys, values), store.decoded(torch.float32), strict=True):
        error = (got - x)[:, :, 4 : 4 + store.packed_tokens].square().mean(-1)
        ratio = float(error[~high].mean() / error[high].mean())
        assert 6 < ratio < 40  # two bits less: 16 times the squared error
    assert torch.equal(store.decoded(torch.float32)[0][:, :, :4], keys[:, :, :4].half().float())


def test_tokens_with_much_attention_get_the_higher_rate():
    """Queries look for certain tokens of each head, among them some that come after the query."""
    keys, values, query = made(1, 600)
    wanted = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:60].view(H, 30) + 10
    rope, places = standard_rope(D), torch.arange(600)
    cos, sin = rope.cos_sin(0, 600, 600, keys.device)
    look = normal(1, H, 1, D, seed=8)
    for h in range(H):  # before RoPE, these keys are along what all queries look for
        keys[0, h, wanted[h]] += 2 * look[0, h]
    query = query * 0.1 + look.repeat_interleave(G, dim=1)
    keys, query = rope.apply(keys, cos[None], sin[None]), rope.apply(query, cos[None], sin[None])
    store = fed(f"{OPTIONS}+{TRELLIS}", (keys, values, query), [0, 600])
    call = AttentionCall(query, None, 0.3)
    rank = importance(store_of(keys, f"{OPTIONS}+{TRELLIS}"), keys, call)
    assert places.numel() == rank.shape[2]
    high = store.ranked[0].is_high()
    for h in range(H):
        packed = wanted[h][wanted[h] < 4 + store.packed_tokens]
        assert float(high[0, h, packed - 4].float().mean()) > 0.9
        assert float(high[0, h].float().mean()) < 0.3


def test_importance_is_attention_of_moved_queries():
    """Against a softmax over queries at positions behind the prompt, with padding and sink logits."""
    n, padding, rope = 40, [0, 7], standard_rope(D)
    keys, _, query = made(2, n)
    logits = normal(H * G, seed=4)
    store = store_of(keys, f"{OPTIONS}+{TRELLIS}")
    call = AttentionCall(query, mask_of(0, n, padding), 0.3, 20.0, logits)
    got = importance(store, keys, call)
    at = [rope.cos_sin(n + i, 1, 1, keys.device) for i in range(n)]
    plain = rope.invert(query, *(x[None] for x in rope.cos_sin(0, n, n, keys.device)))
    for b, p in enumerate(padding):
        for h in range(H):
            sums = torch.zeros(n)
            for g in range(G):
                for i in (i for i in range(p, n) if i % G == g):
                    q = rope.apply(
                        plain[b : b + 1, h * G + g : h * G + g + 1, i : i + 1], at[i][0][None], at[i][1][None]
                    )
                    scores = 20 * torch.tanh(0.3 * keys[b, h].half().float() @ q[0, 0, 0] / 20)
                    scores[:p] = float("-inf")
                    sums += torch.cat([scores, logits[h * G + g].view(1)]).softmax(0)[:n].square()
            torch.testing.assert_close(got[b, h], sums.sqrt(), rtol=1e-3, atol=1e-5)


def test_importance_of_a_bfloat16_model_ranks_as_in_float32():
    """Nearly all weights in bfloat16 are off by less than 3 %, and the same tokens are chosen but for a few."""
    keys, _, query = (x.bfloat16() for x in made(1, 600))
    ranks = []
    for dtype in (torch.bfloat16, torch.float32):
        own, asked = keys.to(dtype), query.to(dtype)
        store = store_of(own, f"{OPTIONS}+{TRELLIS}")
        ranks.append(importance(store, own, AttentionCall(asked, None, 0.3)))
    assert float(((ranks[0] - ranks[1]) / ranks[1]).abs().quantile(0.99)) < 0.03
    best = [{*x.flatten().topk(200).indices.tolist()} for x in ranks]
    assert len(best[0] & best[1]) > 190


def test_queries_stay_without_rope():
    query = normal(1, 2, 3, D)
    assert moved(query, None, 50) is query


def test_rows_of_a_batch_are_as_alone():
    tokens = made(3, 500)
    whole = fed(f"{OPTIONS}+{TRELLIS}", tokens, [0, 400, 500])
    for row in range(3):
        alone = fed(f"{OPTIONS}+{TRELLIS}", tuple(x[row : row + 1] for x in tokens), [0, 400, 500])
        assert torch.equal(whole.ranked[0].is_high()[row : row + 1], alone.ranked[0].is_high())
        for a, b in zip(whole.decoded(torch.float32), alone.decoded(torch.float32), strict=True):
            torch.testing.assert_close(a[row : row + 1], b, rtol=1e-3, atol=1e-3)


def test_padding_has_no_high_rate_before_tokens_have():
    """A row with much padding: its own share of real tokens is high, and padding fills up."""
    prompt = made(2, 700)
    store = fed(f"{OPTIONS}+{TRELLIS}", prompt, [0, 700], [0, 300])
    high = store.ranked[0].is_high()
    assert store.packed_tokens == 640
    assert high.sum(-1).unique().tolist() == [160]
    real = high[1, :, 300:].sum(-1)
    assert real.tolist() == [340 // 4] * H
    seen = torch.zeros(H, 700, dtype=torch.int)
    pages = store.pages()
    for where, tokens in zip(pages.where, pages.tokens, strict=True):
        places, mask = where.positions(), Masks(None, store.hidden).at(where, tokens)
        seen.scatter_add_(1, places[1].long(), mask[1, :, 0].int())
    assert seen.tolist() == [[int(304 <= place < 644) for place in range(700)]] * H


def test_rows_are_selected_copied_and_restored():
    tokens = made(3, 700)
    store = fed(f"{OPTIONS}+{TRELLIS}", tokens, [0, 400, *range(401, 480), 700], [0, 40, 5])
    query = normal(3, H * G, 1, D, seed=9)
    call = AttentionCall(query, mask_of(699, 1, [0, 40, 5]), 0.3)
    out = attend_store(store, call)
    other = store_of(tokens[0], f"{OPTIONS}+{TRELLIS}")
    other.restore(store.state())
    assert torch.equal(attend_store(other, call), out)
    copied = copy.deepcopy(store)
    rows = torch.tensor([2, 0, 0])
    copied.select(rows)
    part = AttentionCall(query[rows], call.mask[rows], 0.3)
    torch.testing.assert_close(attend_store(copied, part), out[rows])
    for s in (store, other):  # both go on alike
        s.append(*(normal(3, H, 1, D, seed=i) for i in (3, 4)))
    assert torch.equal(*(s.decoded(torch.float32)[0] for s in (store, other)))
    broken = store.state()
    broken["ranked"][0]["high"][0, 0, 0] ^= 1
    with pytest.raises(UserError, match="high"):
        store_of(tokens[0], f"{OPTIONS}+{TRELLIS}").restore(broken)


def test_rollback():
    tokens = made(1, 520)
    store = fed(f"{OPTIONS}+{TRELLIS}", tokens, [0, 400, *range(401, 521)])
    before = store.decoded(torch.float32)[0]
    assert store.packed_tokens == 480
    store.crop(30)
    assert torch.equal(store.decoded(torch.float32)[0], before[:, :, :490])
    with pytest.raises(CacheError, match="under the policy mixed the latest 6 can be"):
        store.crop(7)
    store.crop(490)
    assert store.num_tokens == store.packed_tokens == 0
    again = fed(f"{OPTIONS}+{TRELLIS}", tokens, [0, 400])
    keys, values, query = (x[:, :, :400] for x in tokens)
    store.append(keys, values, None, observe(store, keys, values, AttentionCall(query, None, 0.3)))
    assert torch.equal(store.decoded(torch.float32)[0], again.decoded(torch.float32)[0])


def test_generated_tokens_are_ranked_in_chunks():
    """Kept queries look for certain generated tokens, which get the higher rate when they are packed."""
    keys, values, query = made(1, 300)
    places, rope = [*range(90, 110)], standard_rope(D)
    cos, sin = rope.cos_sin(0, 300, 300, keys.device)
    look = normal(1, H, 1, D, seed=8)
    keys[:, :, places] += 2 * look
    query = query * 0.1 + look.repeat_interleave(G, dim=1)
    keys, query = rope.apply(keys, cos[None], sin[None]), rope.apply(query, cos[None], sin[None])
    store = fed(f"{OPTIONS}+{TRELLIS}", (keys, values, query), [0, 70, *range(71, 301)])
    assert (store.packed_tokens, store.sides[0].packed.tokens, store.ranked[0].queries.shape) == (
        256,
        H * 64,
        (1, H * G, KEPT, D),
    )
    assert torch.equal(store.ranked[0].queries, query[:, :, 176:300:EVERY].half())
    assert float(store.ranked[0].is_high()[0, :, [p - 4 for p in places]].float().mean()) > 0.9


def test_few_tokens_wait_until_they_can_be_ranked():
    store = fed(f"{OPTIONS}+{TRELLIS}", made(1, 163), [0, 60, 100, 163])
    assert store.packed_tokens == 0
    store = fed(f"{OPTIONS}+{TRELLIS}", made(1, 164), [0, 60, 100, 164])
    assert store.packed_tokens == 128


def test_a_prompt_without_queries_is_refused():
    keys, values, _ = made(1, 400)
    store = store_of(keys, f"{OPTIONS}+{TRELLIS}")
    with pytest.raises(UserError, match="ranks tokens by queries"):
        store.append(keys, values)
    assert store.num_tokens == 0


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("padding", [None, [0, 37]], ids=["alike", "padded"])
def test_the_bias_of_each_rate_is_corrected(codec: str, padding: list[int] | None):
    """Kernels, the reference, and decoding block by block: each rate's term is added to its scores."""
    tokens = made(2, 600)
    store = fed(f"{OPTIONS},bias_correction=full+{codec}", tokens, [0, 600], padding)
    scaling = 0.3
    high, rest = (tier.keys.correction for tier in store.tiers)
    assert high.shape == rest.shape == (2, H, D)
    assert float(rest.abs().mean()) > 3 * float(high.abs().mean())
    query = 2 * normal(2, H * G, 70, D, seed=9)
    rows = grouped(query, H).flatten(2, 3)
    mapped = next(store.packed_pages()).keys.query(rows)
    biases = [softmax.score_bias(mapped, x, scaling).unsqueeze(-1) for x in (high, rest)]
    of_packed = torch.where(store.ranked[0].is_high().unsqueeze(2), *biases)
    bias = torch.zeros(*rows.shape[:3], 600)
    bias[..., 4 : 4 + store.packed_tokens] = of_packed
    if padding is not None:  # exact sinks of each row come after its padding
        for row, p in enumerate(padding):
            bias[row, ..., p : p + 4] = 0
    keys, values = store.decoded(torch.float32)
    seen = mask_of(599, 1, padding)
    scores = rows @ keys.transpose(-1, -2) * scaling + bias
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
    wanted = (scores.softmax(-1) @ values).reshape(2, H * G, 70, D).transpose(1, 2)
    call = AttentionCall(query, None if seen is None else seen.expand(-1, 70, -1), scaling)
    every = torch.ones(2, 70, 600, dtype=torch.bool) if seen is None else call.mask
    blocks = attend_store(store, AttentionCall(query, every, scaling))
    torch.testing.assert_close(blocks, wanted, rtol=0, atol=1e-4)
    one = AttentionCall(query[:, :, :1].contiguous(), seen, scaling)
    with backends.forced("reference"):
        torch.testing.assert_close(attend_store(store, one), wanted[:, :1], rtol=0, atol=1e-4)
    torch.testing.assert_close(attend_store(store, one), wanted[:, :1], rtol=0, atol=1e-2)
    without = fed(f"{OPTIONS}+{codec}", tokens, [0, 600], padding)
    assert float((attend_store(without, one) - wanted[:, :1]).abs().max()) > 2e-2


def test_lost_variance_is_that_of_the_tokens_of_a_rate():
    tokens = made(2, 600)
    store = fed(f"{OPTIONS},bias_correction=half+kivi:bits=4", tokens, [0, 600])
    got, x = store.decoded(torch.float32)[0], tokens[0].half().float()
    high = torch.zeros(2, H, 600, dtype=torch.bool)
    high[:, :, 4 : 4 + store.packed_tokens] = store.ranked[0].is_high()
    low = torch.zeros_like(high)
    low[:, :, 4 : 4 + store.packed_tokens] = ~store.ranked[0].is_high()
    for chosen, lost in ((high, store.tiers[0].keys.lost), (low, store.tiers[1].keys.lost)):
        for b in range(2):
            for h in range(H):
                places = chosen[b, h].nonzero().flatten().view(-1, 32)  # of blocks, of which at most 8 are looked at
                few = torch.linspace(0, len(places) - 1, min(len(places), LOST_BLOCKS)).long()
                variances = [of[b, h, places[few].flatten()].double().var(0, unbiased=False) for of in (x, got)]
                torch.testing.assert_close(lost[b, h].double(), variances[0] - variances[1], rtol=1e-3, atol=1e-5)
    assert torch.equal(store.tiers[1].keys.correction, store.tiers[1].keys.lost / 4)
    assert store.tiers[1].sides[1].lost is None


def test_lost_variances_are_kept_with_the_tokens():
    tokens, recipe = made(3, 600), f"{OPTIONS},bias_correction=half+kivi:bits=4"
    store = fed(recipe, tokens, [0, 600])
    lost = store.tiers[1].keys.lost
    other = store_of(tokens[0], recipe)
    other.restore(store.state())
    assert torch.equal(other.tiers[1].keys.lost, lost)
    call = AttentionCall(normal(3, H * G, 1, D, seed=9), None, 0.3)
    for same in (other, copy.deepcopy(store)):
        assert torch.equal(attend_store(same, call), attend_store(store, call))
    rows = torch.tensor([2, 0])
    out = attend_store(store, call)[rows]
    store.select(rows)
    assert torch.equal(store.tiers[1].keys.lost, lost[rows])
    torch.testing.assert_close(attend_store(store, AttentionCall(call.query[rows], None, 0.3)), out)
    store.crop(600)
    assert store.tiers[1].keys.lost is store.tiers[0].keys.lost is None
    state = other.state()
    state["tiers"][1]["sides"][0]["lost"] = torch.full((3, H, D), torch.nan)
    with pytest.raises(UserError, match=r"tiers\.1\.sides\.0\.lost"):
        store_of(tokens[0], recipe).restore(state)
    assert "lost" not in fed(f"{OPTIONS}+kivi:bits=4", tokens, [0, 600]).state()["tiers"][1]["sides"][0]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("mixed+qjl", "cannot code tokens at several rates"),
        ("mixed:rest=4+trellis:bits=4", "must be lower than the codec's bits=4"),
        ("mixed:rest=2.5+kivi:bits=4", "rest=2.5 is not available: 2.5 bits are not allowed"),
        ("mixed:budget=1+trellis:bits=4", "budget=1 is not allowed"),
        ("mixed:rest=0+trellis:bits=4", "rest=0 is not allowed"),
        ("mixed+turboquant:bits=4,variant=prod", "variant=mse"),
        ("mixed+uniform:bits=4,axis=channel,group=0", "fits its ranges for one rate"),
    ],
)
def test_what_has_no_second_rate_is_refused(recipe: str, message: str):
    with pytest.raises(UserError, match=message):
        Recipe.parse(recipe)


def test_exact_layers_are_allowed():
    recipe = Recipe.parse("mixed+trellis:bits=4;0=exact")
    keys = normal(1, H, 4, D)
    assert not LayerStore(recipe.plan(0, 2), keys, keys).ranked
    assert LayerStore(recipe.plan(1, 2), keys, keys, None, standard_rope(D)).ranked
