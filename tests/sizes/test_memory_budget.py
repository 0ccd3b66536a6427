"""The option `memory` of policies that evict: the bytes of a sequence never exceed it."""

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import UNSEEN, Observed
from tersekv.errors import UserError
from tersekv.policies.base import MOST_TOKENS
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict
from tersekv.sizes.memory_budget import settled
from tersekv.transforms.rope import standard_rope
from tersekv.units import parse_bytes

ROPE = standard_rope(64)
SHAPE = CacheShape((None,), 2, 64, 64, torch.float32, (ROPE,))


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [
        ("h2o:memory=150kB,recent=32+kivi:bits=2", 150_000),
        ("h2o:memory=200kB,recent=16+trellis:bits=2,calibration=prompt", 200_000),
        ("streaming:memory=200kB,recent=16+turboquant:bits=4", 200_000),
        ("streaming:memory=200kB,recent=16,evict=block+turboquant:bits=4", 200_000),
        ("h2o:memory=300kB,recent=16,rest=2+kivi:bits=4", 300_000),
        ("h2o:memory=300kB,recent=16,rest=1,rest_share=0.8+trellis:bits=4,calibration=prompt", 300_000),
        ("streaming:memory=200kB,recent=16,rest=2+turboquant:bits=4", 200_000),
        ("subgen:memory=300kB,recent=16,rest=2+uniform:bits=4", 300_000),
        ("subgen:memory=150kB,recent=16+int4", 150_000),
        ("h2o:memory=0.5MiB,recent=16+exact", 524_288),
        ("h2o:memory=300kB,recent=0,sinks=0+kvquant:bits=4,calibration=prompt", 300_000),
        ("subgen:variant=stream,memory=200kB,recent=16+turboquant:bits=4", 200_000),
    ],
)
def test_bytes_never_exceed_the_memory(recipe, limit):
    """After a prompt, single tokens and a second prompt, with weights that leave gaps in blocks."""
    torch.manual_seed(0)
    plan = settled(Recipe.parse(recipe), SHAPE).plan(0, 1)
    store = LayerStore(plan, *torch.empty(2, 1, 2, 0, 64), None, ROPE)
    sizes = []
    for n in (1500, *[1] * 70, 40, *[1] * 150):
        votes = UNSEEN
        if store.observed(n):
            held = sum(len(held.slots) for held in store.chosen[0].slots) + store.recent.tokens
            votes = Observed(torch.rand(1, 2, held + n) ** 8)
        store.append(*torch.randn(2, 1, 2, n, 64), None, votes)
        tables = {id(table): table.nbytes for table in store.tables()}
        sizes.append(store.footprint().total_bytes + sum(tables.values()))
    assert max(sizes) <= limit
    assert max(sizes) > 0.4 * limit
    assert predict(SHAPE, recipe, store.num_tokens).total_bytes <= limit


def test_a_model_keeps_more_tokens_with_more_memory(llama):
    kept = []
    for memory in ("120kB", "240kB"):
        recipe = f"h2o:memory={memory},recent=16+kivi:bits=2"
        with torch.no_grad(), tersekv.compress(llama, recipe):
            cache = tersekv.CompressedCache(llama, recipe)
            llama.generate(prompt(600), past_key_values=cache, max_new_tokens=40, do_sample=False)
        assert str(cache.recipe) == recipe
        assert cache.footprint().total_bytes <= parse_bytes(memory, "memory")
        kept.append(int((cache.layers[0].store.chosen[0].positions(0) >= 0).sum()))
    assert kept[0] < kept[1]


def test_memory_that_every_stream_fits(models):
    """Layers that slide hold no more tokens with a longer stream, and nothing is evicted."""
    model, recipe = models["mistral"], "h2o:memory=120kB,recent=16+kivi:bits=2"
    with torch.no_grad(), tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model, recipe)
        model.generate(prompt(100), past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert cache.layers[0].plan.policy.budget == MOST_TOKENS
    assert cache.footprint().total_bytes <= 120_000
    with pytest.raises(UserError, match=r"memory=1kB is too small; .* need \d+\.\d\d kB: give more"):
        tersekv.CompressedCache(model, recipe.replace("120kB", "1kB"))


def test_saved_caches_keep_their_memory(llama, tmp_path):
    recipe = "h2o:memory=150kB,recent=16+kivi:bits=2"
    with torch.no_grad(), tersekv.compress(llama, recipe):
        cache = tersekv.CompressedCache(llama, recipe)
        llama(prompt(400), past_key_values=cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = tersekv.CompressedCache.load(tmp_path / "cache.safetensors", llama)
    assert str(loaded.recipe) == recipe
    assert loaded.layers[0].plan.policy == cache.layers[0].plan.policy


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("snapkv:memory=10MB+exact", "also evicts generated tokens: h2o, streaming or subgen"),
        ("h2o:memory=10+exact", "not a number of bytes; write for example 512MB"),
        ("h2o:memory=0MB+exact", "not a number of bytes"),
        ("h2o:memory=10MB,budget=100+exact", "give one of them"),
    ],
)
def test_wrong_options_are_refused(recipe, reason):
    with pytest.raises(UserError, match=reason):
        Recipe.parse(recipe)


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(UserError, match=r"memory=20kB is too small; 4 sinks, 128 recent tokens .* need \d+\.\d\d kB"):
        settled(Recipe.parse("h2o:memory=20kB+exact"), SHAPE)
    with pytest.raises(UserError, match="needs the model's shape"):
        Recipe.parse("h2o:memory=20kB+exact").policy().kept(100)
