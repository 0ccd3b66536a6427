"""Loss of errors in a prompt's keys and values: against derivatives of attention, and in every kind
of prefill."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from tersekv import CompressedCache, Recipe, compress
from tersekv.attention.observe import observe
from tersekv.attention.prompt_loss import QUERIES, observed_loss
from tersekv.attention.read import AttentionCall
from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.layer import LayerStore
from tersekv.cache.parallel import ContextParallel
from tersekv.cache.segments import UNSEEN
from tersekv.cache.store import LEAST_QUERIES
from tersekv.calibration.capture import LayerTokens, watch_calls
from tersekv.codecs.trellis import Trellis
from tersekv.hf.prefill import Prefill
from tersekv.hf.simulate import SimulatedCache
from tersekv.transforms.moments import Moments, TokenLoss
from tersekv.transforms.rope import standard_rope

RECIPE = "window:sinks=4,recent=32+trellis:bits=2,calibration=prompt"
H, G, D, T = 2, 3, 8, 24


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(keys: Tensor, values: Tensor, query: Tensor, seen: Tensor, logit: float | None) -> Tensor:
    """Return outputs [q, D] of the queries of one head, without any function of the library."""
    scores = (query @ keys.T * 0.3).masked_fill(~seen, float("-inf"))
    if logit is not None:
        scores = torch.cat([scores, torch.full((len(query), 1), logit)], dim=-1)
    return scores.softmax(-1)[:, : len(keys)] @ values


def observed(q: int) -> Tensor:
    return torch.linspace(q // 2, q - 1, min(QUERIES, q - q // 2)).long()


def brute_force(row: tuple[Tensor, ...], seen: Tensor, coded: Tensor, logit: float | None, h: int) -> list[Tensor]:
    """Return key weights, metric and value weights of one KV head from derivatives of its outputs."""
    keys, values, query = row
    at, found = observed(query.shape[1]), [torch.zeros(T), torch.zeros(D), torch.zeros(T)]
    for g in range(G):
        of = query[h * G + g, at]
        by_key = jacobian(lambda k, of=of: attention(k, values[h], of, seen[at], logit), keys[h])  # [q, D, T, D]
        by_value = jacobian(lambda v, of=of: attention(keys[h], v, of, seen[at], logit), values[h])
        squared = by_key.square().sum(1) * coded[:, None]  # [q, T, D]
        found[1] += squared.sum((0, 1))
        found[0] += (squared.sum(-1) / of.square().sum(-1)[:, None]).sum(0) / 0.3**2
        found[2] += by_value.square().sum((0, 1, 3)) / D * coded
    return found


@pytest.mark.parametrize("logit", [None, 0.5])
@pytest.mark.parametrize("q", [T, 10])
def test_loss_is_that_of_derivatives(q: int, logit: float | None):
    """Grouped heads, a row with padding, exact tokens, an earlier chunk, attention sinks."""
    keys, values, query = normal(2, H, T, D), normal(2, H, T, D, seed=1), normal(2, H * G, q, D, seed=2)
    mask = torch.ones(T, T, dtype=torch.bool).tril()[T - q :].repeat(2, 1, 1)
    mask[1, :, :5] = False
    coded = torch.ones(2, T)
    coded[0, :4] = coded[1, 5:9] = 0
    sinks = None if logit is None else torch.full((H * G,), logit)
    of_keys, of_values = observed_loss(keys, values, AttentionCall(query, mask, 0.3, None, sinks), coded)
    for b in range(2):
        for h in range(H):
            wanted = brute_force((keys[b], values[b], query[b]), mask[b], coded[b], logit, h)
            torch.testing.assert_close(of_keys.weights[b, h], wanted[0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(of_keys.metric[b, h], wanted[1], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(of_values.weights[b, h], wanted[2], rtol=1e-4, atol=1e-6)
    assert of_values.metric is None
    assert float(of_values.weights[1, :, :9].sum()) == 0


def test_no_mask_means_causal():
    keys, values, query = normal(1, H, T, D), normal(1, H, T, D, seed=1), normal(1, H * G, 12, D, seed=2)
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, T - 12 :]
    both = [observed_loss(keys, values, AttentionCall(query, m, 0.3), torch.ones(1, T)) for m in (None, mask)]
    torch.testing.assert_close(both[0][0].weights, both[1][0].weights)
    torch.testing.assert_close(both[0][1].weights, both[1][1].weights)


def test_two_rates_have_the_whole_metric():
    """An error in keys costs eᵀ·M·e, here of one observed query, whose products with itself M is."""
    keys, values, query = normal(1, H, T, D), normal(1, H, T, D, seed=1), normal(1, H, 1, D, seed=2)
    call, coded = AttentionCall(query, None, 0.3), torch.ones(1, T)
    diagonal, whole = (observed_loss(keys, values, call, coded, form)[0].metric for form in (False, True))
    share = diagonal / query[:, :, 0].square()
    torch.testing.assert_close(whole, share[..., None] * query[:, :, 0, :, None] * query[:, :, 0, None])
    for policy, dims in (("window", 3), ("mixed", 4)):
        store = store_of(keys, f"{policy}:recent=16+trellis:bits=3,calibration=prompt")
        losses = observe(store, *(normal(1, H, 200, D, seed=s) for s in (3, 4)),
                         AttentionCall(normal(1, H, 200, D, seed=5), None, 0.3)).losses  # fmt: skip
        assert losses[0].metric.dim() == dims


def test_a_fit_uses_the_whole_metric():
    """Errors along a direction that no channel has alone are kept small."""
    x, along = normal(1, 1, 384, 32), normal(32, seed=7) / 32**0.5
    metric = torch.eye(32) + 1000 * torch.outer(along, along)
    fits = [
        Trellis(2.0, calibration="prompt", centre=False).fit_moments(
            Moments.weighted(x, TokenLoss(torch.ones(1, 1, 384), of[None, None]))
        )
        for of in (metric, metric.diagonal())
    ]
    errors = [codec.view(codec.encode(x), 32).decode() - x for codec in fits]
    whole, diagonal = (float((e @ metric * e).sum()) for e in errors)
    assert whole < 0.3 * diagonal


def store_of(keys: Tensor, recipe: str = RECIPE, window: int | None = None) -> LayerStore:
    return LayerStore(Recipe.parse(recipe).plan(0, 1), keys, keys, window, standard_rope(D))


def test_a_chunked_prompt_is_observed_with_all_tokens_so_far():
    n, first = 200, 40
    keys, values, query = normal(1, H, n, D), normal(1, H, n, D, seed=1), normal(1, H * G, n, D, seed=2)
    store = store_of(keys)
    part = AttentionCall(query[:, :, :first], None, 0.3)
    assert observe(store, keys[:, :, :first], values[:, :, :first], part) is UNSEEN  # nothing is packed yet
    store.append(keys[:, :, :first], values[:, :, :first])
    rest = AttentionCall(query[:, :, first:], None, 0.3)
    found = observe(store, keys[:, :, first:], values[:, :, first:], rest)
    coded = torch.ones(1, n)
    coded[:, :4] = 0
    exact = observed_loss(keys.bfloat16(), values.bfloat16(), rest, coded)
    torch.testing.assert_close(found.losses[0].weights, exact[0].weights, rtol=0.05, atol=1e-4)
    store.append(keys[:, :, first:], values[:, :, first:], None, found)
    whole = store_of(keys)
    whole.append(keys, values, None, found)
    for side, other in zip(store.sides, whole.sides, strict=True):
        for name, tensor in side.codec.fitted.items():
            assert torch.equal(tensor, other.codec.fitted[name]), name
    again = AttentionCall(query, None, 0.3)
    assert observe(store, keys, values, again) is UNSEEN  # fitted once


def test_processes_that_share_a_context_observe_a_chunked_prompt():
    keys, query = normal(1, H, 200, D), normal(1, H * G, 160, D, seed=2)
    plan, found = Recipe.parse(RECIPE).plan(0, 1), []
    processes = ContextParallel(0, 2, lambda x: [x, x])
    for store in (LayerStore(plan, keys, keys, None, standard_rope(D), None, processes), store_of(keys)):
        store.append(keys[:, :, :40], keys[:, :, :40])
        found.append(observe(store, keys[:, :, 40:], keys[:, :, 40:], AttentionCall(query, None, 0.3)))
    assert torch.equal(found[0].losses[0].weights, found[1].losses[0].weights)


@pytest.mark.parametrize(
    "recipe",
    ["window+kivi:bits=2", "window+trellis:calibration=prompt,metric=none", "window+polarquant:codebook=online"],
)
def test_other_codecs_observe_nothing(recipe: str):
    keys = normal(1, H, 400, 32)
    store = store_of(keys, recipe)
    assert observe(store, keys, keys, AttentionCall(normal(1, H, 400, 32), None, 0.3)) is UNSEEN


def test_few_queries_are_not_observed():
    keys = normal(1, H, 300, D)
    store = store_of(keys)
    n = LEAST_QUERIES - 1
    assert observe(store, keys, keys, AttentionCall(normal(1, H, n, D), None, 0.3)) is UNSEEN


def test_own_sinks_and_padding_of_a_row_have_no_weight():
    keys, query = normal(2, H, 200, D), normal(2, H * G, 200, D, seed=2)
    mask = torch.ones(200, 200, dtype=torch.bool).tril().repeat(2, 1, 1)
    mask[1, :, :7] = False
    store = store_of(keys)
    found = observe(store, keys, keys, AttentionCall(query, mask, 0.3))
    for loss in found.losses:
        assert bool((loss.weights[0, :, :4] == 0).all())
        assert bool((loss.weights[0, :, 4:] > 0).all())
        assert bool((loss.weights[1, :, :11] == 0).all())
        assert bool((loss.weights[1, :, 11:] > 0).all())
    store.append(keys, keys, torch.tensor([0, 7]), found)
    assert store.packed_tokens
    assert store.padding.tolist() == [0, 7]


def test_a_sliding_window_has_no_sinks():
    keys, query = normal(1, H, 200, D), normal(1, H * G, 200, D, seed=2)
    far = torch.ones(200, 200, dtype=torch.bool)
    mask = (far.tril() & ~far.tril(-64))[None]
    found = observe(store_of(keys, window=64), keys, keys, AttentionCall(query, mask, 0.3))
    assert bool((found.losses[1].weights[0, :, 0:30] == 0).all())  # no observed query sees them
    assert bool((found.losses[1].weights[0, :, 40:] > 0).all())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_prefill_and_a_shared_prefill_fit_the_same_codecs(name: str, models):
    model, ids = models[name], torch.randint(2, 97, (1, 300), generator=torch.Generator().manual_seed(1))
    with compress(model, RECIPE), torch.no_grad():
        cache = CompressedCache(model, RECIPE)
        model(ids, past_key_values=cache)
    shared = CompressedCache(model, RECIPE)
    Prefill(model).fill(shared, ids)
    unseen = CompressedCache(model, RECIPE)  # its attention is the model's own: no queries are seen
    with torch.no_grad():
        model(ids, past_key_values=unseen)
    differs = False
    for a, b, c in zip(cache.layers, shared.layers, unseen.layers, strict=True):
        for side, other, plain in zip(a.store.sides, b.store.sides, c.store.sides, strict=True):
            assert side.packed.tokens
            for key, tensor in side.codec.fitted.items():
                torch.testing.assert_close(tensor.float(), other.codec.fitted[key].float(), rtol=2e-2, atol=1e-3)
            differs |= not torch.equal(side.codec.fitted["scale"], plain.codec.fitted["scale"])
    assert differs


def test_rows_of_a_padded_batch_are_fitted_on_their_own(llama):
    ids = torch.randint(2, 97, (2, 300), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    caches = []
    for rows in (slice(0, 2), slice(0, 1)):
        caches.append(CompressedCache(llama, RECIPE))
        with compress(llama, RECIPE), torch.no_grad():
            llama(ids[rows], attention_mask=mask[rows], past_key_values=caches[-1])
    for both, alone in zip(caches[0].layers, caches[1].layers, strict=True):
        for side, own in zip(both.store.sides, alone.store.sides, strict=True):
            assert len(side.codec.fitted["scale"]) == 2
            first = side.codec.select(torch.tensor([0]))
            torch.testing.assert_close(first.fitted["scale"], own.codec.fitted["scale"], rtol=2e-2, atol=1e-3)


def test_a_saved_cache_keeps_its_fit(llama, tmp_path):
    ids = torch.randint(2, 97, (1, 400), generator=torch.Generator().manual_seed(1))
    cache = CompressedCache(llama, RECIPE)
    with compress(llama, RECIPE), torch.no_grad():
        llama(ids[:, :300], past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = CompressedCache.load(tmp_path / "cache.safetensors", llama)
        logits = [llama(ids[:, 300:], past_key_values=c).logits for c in (cache, loaded)]
    assert torch.equal(*logits)
    for a, b in zip(cache.layers, loaded.layers, strict=True):
        for side, other in zip(a.store.sides, b.store.sides, strict=True):
            assert side.packed.tokens == other.packed.tokens
            for name, tensor in side.codec.fitted.items():
                assert torch.equal(tensor, other.codec.fitted[name])


def test_a_simulation_observes_an_exact_pass(llama):
    recipe = "trellis:bits=2,calibration=prompt"
    ids = torch.randint(2, 97, (1, 200), generator=torch.Generator().manual_seed(1))
    cache = SimulatedCache(llama.config, recipe, sinks=4)
    cache.observe(llama, ids)
    coded, seen = torch.ones(1, 200), {}
    coded[:, :4] = 0

    def see(layer: int, tokens: LayerTokens, call: AttentionCall) -> None:
        seen[layer] = observed_loss(*tokens, call, coded)

    watch_calls(llama, ids, see)
    assert cache.losses.keys() == seen.keys() == {0, 1, 2}
    for layer, losses in cache.losses.items():
        for loss, wanted in zip(losses, seen[layer], strict=True):
            assert torch.equal(loss.weights, wanted.weights)
    with torch.no_grad():
        coded_pass = llama(ids, past_key_values=cache).logits
        plain = llama(ids, past_key_values=SimulatedCache(llama.config, recipe, sinks=4)).logits
    assert not torch.equal(coded_pass, plain)
    kivi = SimulatedCache(llama.config, "kivi:bits=2")
    assert not kivi.observe(llama, ids).losses


# ---------------------------------------------------------------- fits


def test_a_fit_serves_tokens_that_are_read():
    """Sixteen tokens in directions of their own have most of the weight: their errors fall."""
    x, weights = normal(1, 1, 1024, 32) * torch.linspace(2, 0.1, 32), torch.ones(1, 1, 1024)
    x[:, :, 100:116] = x[:, :, 100:116].flip(-1)
    weights[:, :, 100:116] = 1000
    codec = Trellis(2.0, calibration="prompt", side="values")
    fits = [
        coding.fitted(codec, [Tokens(x)]),
        coding.fitted(codec, [Tokens(x[:, :, :300]), Tokens(x[:, :, 300:])], loss=TokenLoss(weights)),
    ]
    errors = [(c.decode(c.encode(x), 32) - x).square().sum(-1)[0, 0] for c in fits]
    assert float(errors[1][100:116].mean()) < 0.4 * float(errors[0][100:116].mean())


def test_equal_weights_are_the_plain_fit():
    x = normal(2, 2, 256, 32)
    codec = Trellis(2.0, calibration="prompt", side="values")
    plain, same = (coding.fitted(codec, [Tokens(x)], loss=loss) for loss in (None, TokenLoss(torch.ones(2, 2, 256))))
    nothing = coding.fitted(codec, [Tokens(x)], loss=TokenLoss(torch.zeros(2, 2, 256)))
    for name, tensor in plain.fitted.items():
        torch.testing.assert_close(same.fitted[name].float(), tensor.float(), rtol=1e-2, atol=1e-2)
        assert torch.equal(same.fitted[name], nothing.fitted[name])  # queries that saw nothing


def test_each_head_is_fitted_on_its_own():
    x, loss = normal(1, 2, 256, 32), TokenLoss(normal(1, 2, 256, seed=3).exp(), normal(1, 2, 32, seed=4).exp())
    codec = Trellis(2.0, calibration="prompt", centre=False)
    both = coding.fitted(codec, [Tokens(x)], loss=loss)
    one = coding.fitted(codec, [Tokens(x[:, 1:])], loss=TokenLoss(loss.weights[:, 1:], loss.metric[:, 1:]))
    for name, tensor in both.of_heads(1, 1).fitted.items():
        assert torch.equal(tensor, one.fitted[name]), name


def test_sums_of_parts_are_those_of_the_whole():
    x, loss = normal(1, 2, 64, 8).double(), TokenLoss(normal(1, 2, 64, seed=3).exp(), normal(1, 2, 8, seed=4).exp())
    whole = Moments.weighted(x, loss)
    parts = Moments.weighted(x[:, :, :20], loss.tokens(0, 20)).plus(Moments.weighted(x[:, :, 20:], loss.tokens(20)))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b))
    by_hand = sum(float(loss.weights[0, 0, t]) * torch.outer(x[0, 0, t], x[0, 0, t]) for t in range(64))
    torch.testing.assert_close(whole.squares[0, 0], by_hand)


def test_each_head_is_observed_on_its_own():
    """A process of a tensor-parallel group has the same loss for its heads as one with all heads."""
    keys, values, query = normal(1, H, 300, D), normal(1, H, 300, D, seed=1), normal(1, H * G, 300, D, seed=2)
    both = observed_loss(keys, values, AttentionCall(query, None, 0.3), torch.ones(1, 300))
    one = observed_loss(keys[:, 1:], values[:, 1:], AttentionCall(query[:, G:], None, 0.3), torch.ones(1, 300))
    for all_heads, own in zip(both, one, strict=True):
        assert torch.equal(all_heads.weights[:, 1:], own.weights)
    assert torch.equal(both[0].metric[:, 1:], one[0].metric)
