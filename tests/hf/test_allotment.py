"""Rates of layers that are chosen on the prompt: what its queries show, and caches that wait for all layers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.attention.read import AttentionCall
from tersekv.attention.spread import importance_and_spread
from tersekv.cache.layer import LayerStore
from tersekv.calibration.attention_spread import measure
from tersekv.errors import CacheError, UserError
from tersekv.models.config import cache_shape
from tersekv.recipe import Recipe
from tersekv.sizes.estimate import predict
from tersekv.sizes.rate_allotment import LEAST_ON_PROMPT, USUAL, allotted
from test_interrupted import interrupted
from test_rate_allotment import has_rates
from test_saved import goes_on_alike, read, singles

RECIPE = "mixed:allot=prompt,recent=20+trellis:bits=2,calibration=prompt"


@pytest.fixture(scope="module")
def sharp(models):
    """Return a model whose layers attend to few tokens."""
    model = copy.deepcopy(models["llama"])
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.q_proj.weight.data *= 10 * (i + 1)
    return model


def filled(model, parts, recipe: str = RECIPE, **options) -> tersekv.CompressedCache:
    with tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model, recipe)
        read(model, cache, parts, **options)
    return cache


def rates(cache: tersekv.CompressedCache) -> list[list[list[float]]]:
    """Return bits, lower bits and share of each head of each layer."""
    return [[] if layer.plan.rates is None else layer.plan.rates.tolist() for layer in cache.layers]


def made(rows: int, heads: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, heads, tokens, 32, generator=torch.Generator().manual_seed(seed))


def store_of(keys: torch.Tensor) -> LayerStore:
    return LayerStore(Recipe.parse(RECIPE).plan(0, 1), keys[:, :, :0], keys[:, :, :0])


@pytest.mark.parametrize("first", [10, 40])
def test_rates_are_chosen_in_inference_mode_after_a_short_call(sharp, first):
    """The exact window is written to later."""
    with torch.inference_mode():
        cache = filled(sharp, [prompt(200)[:, :first], prompt(200)[:, first:], *singles(40)])
    assert rates(cache)[0]
    assert cache.get_seq_length() == 240


def test_the_spread_is_that_of_later_queries(llama):
    """Over all tokens of a prompt it sums to the squared weights of its last quarter."""
    keys, query = made(1, 2, 400), made(1, 4, 400, 1)
    call = AttentionCall(query, None, 0.2)
    importance, spread = importance_and_spread(store_of(keys), keys, call)
    assert importance.shape == (1, 2, 400)
    assert (spread.diff(dim=-1) >= 0).all()
    at = torch.arange(300, 400)
    rows = torch.stack([query[0, [h * 2 + i % 2 for h in range(2)], t] for i, t in enumerate(at.tolist())], dim=1)
    scores = rows @ keys[0].mT * 0.2
    weights = scores.masked_fill(torch.arange(400) > at[:, None], -torch.inf).softmax(-1)
    whole = weights[:, :, 4:280].square().sum(-1).mean(-1)  # 4 sinks; 20 tokens before the later queries are recent
    torch.testing.assert_close(spread[:, -1], whole)


def test_padding_changes_nothing(llama):
    keys, query = made(1, 2, 300), made(1, 4, 300, 1)
    _, alone = importance_and_spread(store_of(keys), keys, AttentionCall(query, None, 0.2))
    padded = [torch.nn.functional.pad(x, (0, 0, 40, 0), value=3.0) for x in (keys, query)]
    seen = torch.ones(340, 340, dtype=torch.bool).tril()[None] & (torch.arange(340) >= 40)
    seen = seen | torch.eye(340, dtype=torch.bool) & (torch.arange(340) >= 40)
    store = store_of(padded[0])
    _, beside = importance_and_spread(store, padded[0], AttentionCall(padded[1], seen, 0.2))
    assert beside[:, -1] == pytest.approx(alone[:, -1], rel=0.2)  # the last quarter begins 10 tokens later
    assert (beside[:, 8] / beside[:, -1]) == pytest.approx(alone[:, 8] / alone[:, -1], rel=0.2)


def test_few_queries_show_no_spread(llama):
    keys = made(1, 2, 60)
    assert importance_and_spread(store_of(keys), keys, AttentionCall(made(1, 4, 60, 1), None, 0.2))[1] is None
    cache = filled(llama, [prompt(40), *singles(300)])
    plans = {i: Recipe.parse(RECIPE).plan(i, 3) for i in range(3)}
    usual = allotted(plans, USUAL.repeat(3, 2, 1), (32, 32))
    assert rates(cache) == [plan.rates.tolist() for plan in usual.values()]


def test_layers_get_rates_by_the_prompt(sharp):
    """They are near those of a measurement on the same text, and share the same bytes."""
    ids = prompt(2000)
    cache = filled(sharp, [ids])
    spread = measure(sharp, ids, False)
    plans = allotted({i: Recipe.parse(RECIPE).plan(i, 3) for i in range(3)}, spread, (32, 32))
    ours, theirs = (
        [share * bits + (1 - share) * rest for heads in found for bits, rest, share in heads]
        for found in (rates(cache), [plan.rates.tolist() for plan in plans.values()])
    )
    assert ours == pytest.approx(theirs, abs=0.3)
    assert sum(ours) / len(ours) == pytest.approx(2, abs=0.1)
    assert min(rest for heads in rates(cache) for _, rest, _ in heads) >= LEAST_ON_PROMPT
    for layer in cache.layers:
        has_rates(layer.store, layer.plan.rates)
    predicted = predict(cache_shape(sharp.config), Recipe.parse(RECIPE), 2000).total_bytes
    assert cache.footprint().total_bytes == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize("codec", ["kivi:bits=2", "turboquant:bits=3", "trellis:bits=2"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("empty_cache")
def test_a_saved_cache_goes_on(llama, tmp_path, codec):
    recipe = f"mixed:allot=prompt,recent=20,bias_correction=full+{codec}"
    with tersekv.compress(llama, recipe):
        held = tersekv.CompressedCache(llama, recipe)
        read(llama, held, [prompt(30), prompt(400), *singles(5)])
        goes_on_alike(llama, held, tmp_path / "cache.safetensors", [*singles(3), prompt(300, seed=2)])


def test_a_prompt_in_chunks_keeps_the_rates_of_the_first(llama, recwarn):
    with pytest.warns(UserWarning, match="chosen on the first 200 tokens.*prefill_chunk_size=2048"):
        cache = filled(llama, [prompt(200), prompt(200, seed=1)])
    recwarn.clear()
    assert rates(cache) == rates(filled(llama, [prompt(200)]))
    filled(llama, [prompt(200), *singles(1), prompt(200, seed=1)])
    cache.reset()
    with tersekv.compress(llama, RECIPE):
        read(llama, cache, [prompt(200)])
    later = [str(one.message) for one in recwarn if "were chosen" in str(one.message)]
    assert later == [], "a second turn, or a prompt after a reset, is not the rest of the first prompt"


@pytest.mark.parametrize("way", ["crop", "reset", "empty", "loaded", "pickled"])
def test_another_prompt_gets_rates_of_its_own(sharp, way, tmp_path):
    cache, other = filled(sharp, [prompt(300)]), prompt(500, seed=3)
    if way == "loaded":
        cache.save(tmp_path / "x.safetensors", model=sharp)
        cache = tersekv.CompressedCache.load(tmp_path / "x.safetensors", sharp)
    if way == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
    if way == "empty":
        cache = cache.empty(sharp.config)
    elif way == "reset":
        cache.reset()
    else:
        cache.crop(-300)
    with tersekv.compress(sharp, RECIPE):
        read(sharp, cache, [other])
    fresh = filled(sharp, [other])
    assert rates(cache) == rates(fresh) != rates(filled(sharp, [prompt(300)]))
    assert cache.footprint().total_bytes == fresh.footprint().total_bytes


@pytest.mark.parametrize("layer", [1, 2])
def test_an_interrupted_pass_leaves_nothing_behind(llama, layer):
    ids, later = prompt(300), prompt(400, seed=1)
    with tersekv.compress(llama, RECIPE), torch.no_grad():
        cache = tersekv.CompressedCache(llama, RECIPE)
        llama(ids[:, :30], past_key_values=cache)
        with interrupted(llama.model.layers[layer].mlp, KeyboardInterrupt()):
            llama(ids[:, 30:], past_key_values=cache)
        if layer < 2:
            with pytest.raises(CacheError, match=r"undo the pass with cache.crop\(-270\)"):
                llama(later, past_key_values=cache)
            cache.crop(-270)
            llama(later, past_key_values=cache)
    if layer < 2:
        fresh = filled(llama, [ids[:, :30], later])
        assert rates(cache) == rates(fresh)
        assert cache.footprint().total_bytes == fresh.footprint().total_bytes
    else:
        assert rates(cache) == rates(filled(llama, [ids[:, :30], ids[:, 30:]]))


def test_copies_choose_for_themselves(sharp):
    cache = filled(sharp, [prompt(30)])
    copied = copy.deepcopy(cache)
    with tersekv.compress(sharp, RECIPE):
        read(sharp, copied, [prompt(300)])
    assert rates(cache) == [[], [], []]
    assert rates(copied) == rates(filled(sharp, [prompt(30), prompt(300)]))


def test_batches_with_padding(llama):
    ids = prompt(300, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :90] = 0
    with tersekv.compress(llama, RECIPE):
        out = llama.generate(ids, attention_mask=mask, num_beams=2, max_new_tokens=5, do_sample=False)
    assert out.shape[0] == 2


def test_recipes_that_leave_no_choice(llama):
    with pytest.raises(UserError, match=r"allot=prompt needs the same bits for keys and values .* got 2, 3"):
        tersekv.CompressedCache(llama, "mixed:allot=prompt+trellis:bits=2/trellis:bits=3,calibration=prompt")
    cache = tersekv.CompressedCache(llama, RECIPE)
    with torch.no_grad(), pytest.raises(UserError, match=r"use `with tersekv.compress"):
        llama(prompt(300), past_key_values=cache)


def test_a_model_with_few_global_layers(models):
    """Sliding-window layers have one rate and do not wait."""
    cache = filled(models["gemma3"], [prompt(300)])
    chosen = [layer.plan.rates is not None for layer in cache.layers]
    assert chosen == [layer.sliding_window is None for layer in cache.layers]
