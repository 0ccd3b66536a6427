"""The option `found` of the policy window: packed tokens of unusual norm stay exact."""

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.attention.read import AttentionCall, attend_chunk, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.errors import UserError
from tersekv.kernels.registry import forced
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict
from tersekv.transforms.rope import standard_rope

RECIPES = ("window:found=4,recent=32+kivi:bits=2", "window:found=4,recent=32+trellis:bits=2,calibration=prompt")
ROPE = standard_rope(64)
ODD = (40, 77, 150, 151)
"""Positions of tokens whose keys or values are made longer or shorter."""


def tokens(n=300, rows=1, seed=0, heads=2):
    x = torch.randn(2, rows, heads, n, 64, generator=torch.Generator().manual_seed(seed))
    for place in (p for p in ODD if p < n):
        x[place % 2, :, 0, place] *= 20 if place != 77 else 0.01
    return x


def filled(recipe, x, parts=(), padding=None):
    store = LayerStore(Recipe.parse(recipe).plan(0, 1), *x[..., :0, :], None, ROPE)
    first = 0
    for n in (*parts, x.shape[3] - sum(parts)):
        store.append(*x[..., first : first + n, :], padding if not first else None)
        first += n
    return store


def attended(store, query, mask=None):
    """Return attention of the latest queries as the reader computes it, and over decoded tokens."""
    call = AttentionCall(query, mask, 0.125)
    keys, values = store.decoded(torch.float32)
    scores = query.unflatten(1, (store.kv_heads, -1)) @ keys.unsqueeze(2).mT * 0.125
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    wanted = (scores.softmax(-1) @ values.unsqueeze(2)).flatten(1, 2).transpose(1, 2)
    return attend_store(store, call), wanted


@pytest.mark.parametrize("recipe", RECIPES)
def test_unusual_tokens_are_exact_and_counted_once(recipe):
    x = tokens()
    store = filled(recipe, x)
    assert store.found
    assert sorted(store.found[0].places[0].tolist()) == list(ODD)
    decoded = store.decoded(torch.float32)
    for held, exact in zip(decoded, x, strict=True):
        torch.testing.assert_close(held[:, :, ODD], exact[:, :, ODD], atol=2e-2, rtol=1e-3)
    assert float((decoded[0] - x[0])[:, :, 50:70].abs().max()) > 0.1  # others are packed
    for q in (1, 3, 90):  # kernels, and blocks that are decoded
        query = torch.randn(1, 4, q, 64, generator=torch.Generator().manual_seed(q))
        mask = torch.ones(1, q, 300, dtype=torch.bool).tril(300 - q)
        got, wanted = attended(store, query, mask if q > 1 else None)
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_reference_and_chunks_hide_the_copies(recipe):
    store = filled(recipe, tokens())
    own = tokens(20, seed=1)
    query = torch.randn(1, 4, 20, 64, generator=torch.Generator().manual_seed(2))
    call = AttentionCall(query, None, 0.125)
    got = attend_chunk(store, *own, call)
    with forced("reference"):
        wanted = attend_chunk(store, *own, call)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3)
    keys, values = (torch.cat([a, b], dim=2) for a, b in zip(store.decoded(torch.float32), own, strict=True))
    scores = query.unflatten(1, (2, 2)) @ keys.unsqueeze(2).mT * 0.125
    hidden = torch.ones(20, 320, dtype=torch.bool).tril(300)
    out = (scores.masked_fill(~hidden, float("-inf")).softmax(-1) @ values.unsqueeze(2)).flatten(1, 2).transpose(1, 2)
    torch.testing.assert_close(got, out, atol=2e-4, rtol=2e-3)


def test_parts_find_the_most_unusual_tokens_of_all():
    x = tokens()
    store = filled(RECIPES[0], x, parts=(100, 60, *[1] * 40))
    assert sorted(store.found[0].places[0].tolist()) == list(ODD)
    replaced = filled("window:found=1,recent=32,start=0+kivi:bits=2", x, parts=(120,))
    assert replaced.found[0].places.shape == (1, 1)
    assert int(replaced.found[0].places) == 77  # the shortest one is farther away than the longest ones


def test_rows_with_padding_find_what_they_find_alone():
    x, padding = tokens(rows=2), torch.tensor([0, 60])
    store = filled(RECIPES[0], x, padding=padding)
    assert sorted(store.found[0].places[0].tolist()) == list(ODD)
    assert {77, 150, 151} <= set(store.found[0].places[1].tolist())
    assert all(place < 0 or place >= 64 for place in store.found[0].places[1].tolist())
    mask = torch.ones(2, 1, 300, dtype=torch.bool)
    mask[1, :, :60] = False
    got, wanted = attended(store, torch.randn(2, 4, 1, 64, generator=torch.Generator().manual_seed(3)), mask)
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-3)
    store.select(torch.tensor([1, 1, 0]))
    assert store.found[0].places.shape == (3, 4)
    assert sorted(store.found[0].places[2].tolist()) == list(ODD)


@pytest.mark.parametrize("parts", [(), (100,)])
def test_padding_does_not_change_what_is_usual(parts):
    """Tokens of the padding are longer, and their number is one of whole blocks."""
    x, p = tokens(n=600), 256
    x[..., :p, :] *= 3
    both = filled(RECIPES[0], x.repeat(1, 2, 1, 1, 1), parts, padding=torch.tensor([0, p]))
    alone = filled(RECIPES[0], x[..., p:, :])
    (of_both,), (of_alone,) = both.found, alone.found
    torch.testing.assert_close(of_both.usual[1], of_alone.usual[0])
    assert sorted(of_both.places[1].tolist()) == [p + place for place in sorted(of_alone.places[0].tolist())]


@pytest.mark.parametrize("left", [290, 200, 152, 151, 60, 0])
def test_rollback_keeps_found_tokens_exact(left):
    x = tokens()
    store = filled(RECIPES[0], x)
    store.crop(300 - left)
    assert store.num_tokens == left
    assert all(place < store.packed_first + store.packed_tokens for place in store.found[0].places.flatten().tolist())
    keys, _ = store.decoded(torch.float32)
    for place in (p for p in ODD if p < left):
        torch.testing.assert_close(keys[:, :, place], x[0, :, :, place], atol=2e-2, rtol=1e-3)
    store.append(*tokens(300, seed=4))
    got, wanted = attended(store, torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(5)))
    torch.testing.assert_close(got, wanted, atol=2e-4, rtol=2e-3)


def test_saved_and_estimated(llama, tmp_path):
    recipe = "window:found=8,recent=32+kivi:bits=2"
    with torch.no_grad(), tersekv.compress(llama, recipe):
        cache = tersekv.CompressedCache(llama, recipe)
        llama(prompt(400), past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        loaded = tersekv.CompressedCache.load(tmp_path / "cache.safetensors", llama)
        both = [llama(prompt(3, seed=1), past_key_values=c).logits for c in (cache, loaded)]
    assert torch.equal(*both)
    assert loaded.layers[0].store.found[0].places.shape == (1, 8)
    shape = CacheShape((None,), 2, 64, 64, torch.float16, (ROPE,))
    store = filled(recipe, tokens(1000))
    tables = {id(table): table.nbytes for table in store.tables()}
    assert store.footprint().total_bytes + sum(tables.values()) == predict(shape, recipe, 1000).total_bytes


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("window:found=-1+kivi", "allowed are 0 to 1024"),
        ("window:found=9999+kivi", "allowed are 0 to 1024"),
    ],
)
def test_wrong_options_are_refused(recipe, reason):
    with pytest.raises(UserError, match=reason):
        Recipe.parse(recipe)


@pytest.mark.parametrize("sinks", [0, 4])
def test_padding_is_never_found(sinks):
    """Also without attention sinks, whose rows need no padding later."""
    keys, values = tokens(300, rows=2)[:2]
    recipe = f"window:sinks={sinks},recent=16,found=4+kivi:bits=4"
    store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values)
    store.append(keys, values, torch.tensor([0, 100]))
    places = store.found[0].places
    assert int(places[1].min()) >= 100 + sinks
    assert (store.padding is None) == (sinks == 0)
