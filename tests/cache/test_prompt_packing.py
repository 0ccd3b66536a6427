"""`window:generated=exact`: prompts are packed, and generated tokens stay exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.cache.layer import LayerStore
from tersekv.cache.pages import GROWTH, MIN_PAGE_TOKENS, ROLLBACK_TOKENS
from tersekv.errors import UserError
from tersekv.models.config import cache_shape
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict
from test_saved import KINDS, calibration, goes_on_alike, read, singles
from test_saved import wide as wide
from test_store import contents, fed, tokens
from test_transformers import GREEDY

EXACT = "window:generated=exact,recent=20+kivi:bits=2"
PLAIN = "window:recent=20+kivi:bits=2"
FOUND = "window:found=8,recent=20+kivi:bits=2"
LOSSLESS = "window:generated=exact,sinks=4,recent=32,exact=fp32+exact:dtype=fp32"


def same(a: LayerStore, b: LayerStore) -> bool:
    return all(torch.equal(x, y) for x, y in zip(contents(a), contents(b), strict=True))


@pytest.mark.parametrize(
    "cuts",
    [[0, 300], [0, 64, 128, 192, 256, 300], [0, 90, 180, 270, 300], [0, 256, 258, 300], [0, 32, 300], [0, 5, 300]],
)
@pytest.mark.parametrize("window", [None, 90])
def test_a_prompt_in_chunks_is_packed_as_in_one_call(cuts, window):
    """Chunks of 32 tokens or more, and a shorter last one, give the bytes of one call."""
    keys, values = tokens(300)
    store = fed(EXACT, keys, values, cuts, window)
    assert same(store, fed(PLAIN, keys, values, cuts, window))
    assert store.packed_tokens > 0


def test_generated_tokens_stay_exact_until_the_next_prompt():
    keys, values = tokens(800)
    store = fed(EXACT, keys, values, [0, 300, *range(301, 701)])
    packed = (300 - 4 - 20) // 32 * 32
    assert (store.num_tokens, store.packed_tokens, store.recent.tokens) == (700, packed, 700 - 4 - packed)
    for x, back in zip((keys, values), store.decoded(torch.float32), strict=True):
        assert torch.equal(back[:, :, 300:], x[:, :, 300:700].half().float())
    store.append(keys[:, :, 700:], values[:, :, 700:])
    assert same(store, fed(PLAIN, keys, values, [0, 800]))
    assert (
        store.footprint().parts["exact window"] == fed(PLAIN, keys, values, [0, 800]).footprint().parts["exact window"]
    )


def test_short_calls_after_generated_tokens_are_proposals():
    keys, values = tokens(500)
    store = fed(EXACT, keys, values, [0, 300, 301, *range(320, 480, 10)])
    assert store.packed_tokens == fed(PLAIN, keys, values, [0, 300]).packed_tokens
    store.crop(150)  # also returns a part of a packed block to the tail
    packed = store.packed_tokens
    store.append(keys[:, :, 330:350], values[:, :, 330:350])
    assert store.packed_tokens == packed
    store = fed(EXACT, keys, values, [0, 300])
    store.crop(3)  # proposals in the first call were rejected, so no prompt continues
    packed = store.packed_tokens
    store.append(keys[:, :, 297:328], values[:, :, 297:328])
    assert store.packed_tokens == packed
    store.crop(328)
    store.append(keys[:, :, :300], values[:, :, :300])
    assert store.packed_tokens == fed(PLAIN, keys, values, [0, 300]).packed_tokens


def test_nothing_is_packed_before_the_start():
    keys, values = tokens(700)
    store = fed("window:generated=exact,start=300+kivi:bits=2", keys, values, [0, 200, *range(201, 601)])
    assert store.packed_tokens == 0
    store.append(keys[:, :, 600:], values[:, :, 600:])
    assert store.packed_tokens == (700 - 4 - 128) // 32 * 32


def test_rows_of_a_padded_batch():
    """Rows start when each has its sinks, with all tokens so far as the prompt."""
    keys, values = tokens(400, B=2)
    padding = torch.tensor([150, 0])
    stores = [LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values) for recipe in (EXACT, PLAIN)]
    for store in stores:
        for a, b in [(0, 100), (100, 300)]:
            store.append(keys[:, :, a:b], values[:, :, a:b], padding.clamp(max=b) if store.deferred else None)
    assert same(*stores)
    packed = stores[0].packed_tokens
    for i in range(300, 400):
        stores[0].append(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    assert stores[0].packed_tokens == packed < stores[1].num_tokens


@pytest.mark.parametrize("window", [90, 400])
def test_sliding_windows_evict_generated_tokens(window):
    keys, values = tokens(2000, D=32)
    store = fed(EXACT, keys, values, [0, 300, *range(301, 2001)], window)
    assert store.packed_tokens == 0
    assert window <= store.recent.tokens < window + ROLLBACK_TOKENS + 2 * store.flush_tokens
    assert store.num_evicted + store.recent.tokens == 2000
    assert torch.equal(store.decoded(torch.float32)[0], keys[:, :, store.num_evicted :].half().float())
    while store.num_tokens > 1990:
        store.crop(1)
    store.append(keys[:, :, 1900:], values[:, :, 1900:])
    assert store.packed_tokens > 0
    store.record_past(True)
    before = store.num_evicted
    for i in range(200):
        store.append(keys[:, :, i : i + 1], values[:, :, i : i + 1])
    assert store.num_evicted == before


def test_the_window_grows_without_a_copy_at_every_token():
    keys, values = tokens(4000, D=8)
    store = fed("window:generated=exact,sinks=0,recent=0+exact", keys, values, [0, 64])
    memory, copies = store.recent.buffers[0].data_ptr(), 0
    for i in range(64, 4000):
        store.append(keys[:, :, i : i + 1], values[:, :, i : i + 1])
        copies += store.recent.buffers[0].data_ptr() != memory
        memory = store.recent.buffers[0].data_ptr()
    assert 10 < copies < 40
    allocated, used = store.recent.buffers[0].shape[2], store.recent.tokens
    assert used <= allocated <= used + max(MIN_PAGE_TOKENS, used // GROWTH)


@pytest.mark.parametrize("window", [None, 90, 600])
@pytest.mark.parametrize(
    ("count", "piece", "generated"), [(700, 0, 0), (700, 64, 350), (700, 0, 699), (1500, 128, 1130), (900, 300, 7)]
)
def test_estimate(window, count, piece, generated):
    keys, values = tokens(count, H=1)
    fed_first = count - generated
    cuts = [*range(0, fed_first, piece or fed_first), *range(fed_first, count + 1)]
    held = fed(EXACT, keys, values, cuts, window).footprint().parts
    shape = CacheShape((window,), 1, 64, 64, torch.float32)
    expected = predict(shape, EXACT, count, piece=piece, generated=generated).parts
    assert held | {"tables": 0} == expected | {"tables": 0}


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_estimate_of_a_model(models, name):
    model = models[name]
    with tersekv.compress(model, EXACT), torch.no_grad():
        cache = tersekv.CompressedCache(model.config, EXACT)
        read(model, cache, [prompt(300, 2), *singles(100, 2)])
    shape = replace(cache_shape(model.config), dtype=torch.float32)
    assert cache.footprint().parts == predict(shape, EXACT, 400, batch=2, generated=100).parts


@pytest.mark.parametrize("recipe", KINDS)
def test_every_method_packs_the_prompt_only_and_can_be_saved(wide, recipe, tmp_path):
    learnt = calibration(wide, recipe, tmp_path)
    recipe = f"window:generated=exact,recent=20,start=0+{recipe}"
    with tersekv.compress(wide, recipe, learnt):
        cache = tersekv.CompressedCache(wide.config, recipe, learnt)
        read(wide, cache, [prompt(200)])
        packed = cache.layers[0].store.packed_tokens
        logits = read(wide, cache, singles(40))
        assert cache.layers[0].store.packed_tokens == packed > 0
        assert all(torch.isfinite(x).all() for x in logits)
        goes_on_alike(wide, cache, tmp_path / "cache", [*singles(3, seed=2), prompt(70, seed=3), *singles(3)])


@pytest.mark.parametrize("after", [[], [prompt(1)], [prompt(1), prompt(40, seed=4)]])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_file_knows_if_a_prompt_continues(models, name, after, tmp_path):
    model = models[name]
    with tersekv.compress(model, EXACT):
        cache = tersekv.CompressedCache(model.config, EXACT)
        read(model, cache, [prompt(301), *after])
        goes_on_alike(model, cache, tmp_path / "cache", [prompt(31, seed=5), *singles(40), prompt(50, seed=6)])


def same_tokens(model, lossless, options):
    """Check that `generate` gives the same tokens as with the full cache, and return the cache."""
    ids = prompt(40).repeat(1, 5)
    kwargs = GREEDY | options | {"attention_mask": torch.ones_like(ids), "max_new_tokens": 40}
    expected = model.generate(ids, **kwargs)
    with tersekv.compress(model, lossless):
        cache = tersekv.CompressedCache(model.config, lossless)
        got = model.generate(ids, past_key_values=cache, **kwargs)
    assert got.tolist() == expected.tolist()
    return cache


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 64}, {"prompt_lookup_num_tokens": 5}],
    ids=["greedy", "beam", "chunked", "assisted"],
)
@pytest.mark.filterwarnings("ignore")
def test_transformers_tokens(models, name, options):
    cache = same_tokens(models[name], LOSSLESS, options)
    full = next(layer for layer in cache.layers if layer.sliding_window is None)
    assert 0 < full.store.packed_tokens <= 200


def two_padded_turns(model, lossless):
    """Check that a padded batch and a second turn over its cache get the same tokens as with the full cache."""
    ids, mask = prompt(150, batch=2), torch.ones(2, 150, dtype=torch.long)
    mask[0, :37] = 0
    expected = model.generate(ids * mask, attention_mask=mask, **GREEDY)
    with tersekv.compress(model, lossless):
        cache = tersekv.CompressedCache(model.config, lossless)
        first = model.generate(ids * mask, attention_mask=mask, past_key_values=cache, **GREEDY)
        assert first.tolist() == expected.tolist()
        second = torch.cat([first, prompt(90, batch=2, seed=1)], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, second.shape[1] - 150)], dim=1)
        got = model.generate(second, attention_mask=mask, past_key_values=cache, **GREEDY)
    assert got.tolist() == model.generate(second, attention_mask=mask, **GREEDY).tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_padded_batch_and_turns(models, name):
    two_padded_turns(models[name], LOSSLESS)


def test_found_tokens_beside_generated_ones():
    """Tokens are found when they are packed, so none is found among generated ones."""
    keys, values = tokens(500)
    keys[:, :, 150] *= 9
    keys[:, :, 400] *= 40
    store = fed(EXACT.replace("generated", "found=1,generated"), keys, values, [0, 300, *range(301, 451)])
    assert store.found[0].places.tolist() == [[150]]
    store.crop(200)
    assert torch.equal(store.decoded(torch.float32)[0][:, :, 150], keys[:, :, 150].half().float())
    store.append(keys[:, :, 250:], values[:, :, 250:])
    assert store.found[0].places.tolist() == [[400]]


def test_grammar():
    assert str(Recipe.parse(EXACT)) == EXACT
    with pytest.raises(UserError, match="generated=8bit is not allowed; choose one of packed, exact"):
        Recipe.parse("window:generated=8bit+int4")
