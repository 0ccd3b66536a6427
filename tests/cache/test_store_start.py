"""`window:start=N`: nothing is packed before a layer has N tokens; afterwards it behaves as without
the option."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.errors import UserError
from tersekv.models.config import cache_shape
from tersekv.recipe import Recipe
from tersekv.sizes.estimate import predict
from test_context_parallel import same_as_one
from test_saved import goes_on_alike, read, singles
from test_saved import wide as wide
from test_store import contents, fed, store, tokens

START = "window:start=300+kivi:bits=2"
PLAIN = "window:start=0+kivi:bits=2"


@pytest.mark.parametrize("recipe", [START, "window:start=300,recent=20+qjl:outliers=0/int4"])
@pytest.mark.parametrize("cuts", [[0, 400], [0, 5, 200, 299, 300, 400], list(range(401))])
def test_bytes_do_not_depend_on_how_tokens_were_fed(recipe, cuts):
    keys, values = tokens(400)
    once, parts = fed(recipe, keys, values, [0, 400]), fed(recipe, keys, values, cuts)
    plain = fed(recipe.replace("start=300", "start=0"), keys, values, [0, 400])
    for a, b, c in zip(contents(once), contents(parts), contents(plain), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_all_is_packed_at_once_and_exact_before():
    keys, values = tokens(300)
    s = fed(START, keys, values, list(range(300)))
    assert (s.num_tokens, s.packed_tokens) == (299, 0)
    assert torch.equal(s.decoded(torch.float32)[0], keys[:, :, :299].half().float())
    s.append(keys[:, :, 299:], values[:, :, 299:])
    assert s.packed_tokens == (300 - 4 - 128) // 32 * 32
    assert s.footprint() == fed(PLAIN, keys, values, [0, 300]).footprint()  # the exact tokens' memory was freed


@pytest.mark.parametrize(
    ("recipe", "first"), [("int4", 256), ("window:recent=150+int4", 300), ("window:start=0+int4", 164)]
)
def test_without_the_option_it_is_twice_recent(recipe, first):
    keys, values = tokens(first)
    assert fed(recipe, keys, values, [0, first - 1]).packed_tokens == 0
    assert fed(recipe, keys, values, [0, first]).packed_tokens > 0


def test_crop_before_the_start_and_continue():
    """Packed tokens stay packed. More are packed only when the same number of tokens is reached
    again."""
    keys, values = tokens(500)
    s = fed(START, keys, values, [0, 310])
    packed = s.packed_tokens
    s.crop(20)
    assert s.packed_tokens == packed
    s.crop(200)  # into the packed blocks
    assert 0 < s.packed_tokens < packed
    few = s.packed_tokens
    s.append(keys[:, :, 90:299], values[:, :, 90:299])
    assert s.packed_tokens == few
    s.append(keys[:, :, 299:400], values[:, :, 299:400])
    assert s.packed_tokens == fed(PLAIN, keys, values, [0, 400]).packed_tokens
    s.crop(400)
    s.append(keys[:, :, :200], values[:, :, :200])
    assert s.packed_tokens == 0


def test_fitted_on_all_tokens_held():
    """The codec is fitted as on a prompt with the same number of tokens."""
    keys, values = tokens(300)
    coder = "kvquant:calibration=prompt,pre_rope=false"
    late, once = (
        fed(f"window:start={n}+{coder}", keys, values, cuts) for n, cuts in ((300, [0, 180, 300]), (0, [0, 300]))
    )
    early = fed(f"window:start=0+{coder}", keys, values, [0, 180, 300])
    learnt = [s.keys.codec.fitted for s in (late, once, early)]
    assert all(torch.equal(learnt[0][name], learnt[1][name]) for name in learnt[0])
    assert not all(torch.equal(learnt[0][name], learnt[2][name]) for name in learnt[0])


def test_padded_batch():
    """Rows start when each has its sinks, as without the option; packing starts later."""
    keys, values = tokens(400, B=2)
    padding = torch.tensor([150, 0])
    late, plain = store(START, keys, values), store(PLAIN, keys, values)
    for a, b in [(0, 100), (100, 299), (299, 301), (301, 400)]:
        for s in (late, plain):
            s.append(keys[:, :, a:b], values[:, :, a:b], padding.clamp(max=b) if s.deferred else None)
        assert (late.deferred, late.packed_tokens > 0) == (plain.deferred, b >= 300)
    for x, y in zip(contents(late), contents(plain), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("window", "first"), [(None, 300), (512, 300), (100, 160)])
def test_sliding_windows(window, first):
    """A layer whose window is smaller than N packs as without the option, because it would hold
    unread tokens."""
    keys, values = tokens(1200)
    assert fed(START, keys, values, [*range(first)], window).packed_tokens == 0
    assert fed(START, keys, values, [*range(first + 5)], window).packed_tokens > 0
    late, plain = (fed(recipe, keys, values, [*range(1201)], window) for recipe in (START, PLAIN))
    assert (late.packed_tokens, late.num_evicted) == (plain.packed_tokens, plain.num_evicted)
    assert (late.num_evicted > 0) == (window is not None)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("n", [100, 299, 300, 700])
def test_estimate(models, name, n):
    model = models[name]
    with tersekv.compress(model, START), torch.no_grad():
        cache = tersekv.CompressedCache(model.config, START)
        model(prompt(n, batch=2), past_key_values=cache)
    shape = replace(cache_shape(model.config), dtype=torch.float32)
    assert cache.footprint().parts == predict(shape, START, n, batch=2).parts


def test_saved_before_the_start_it_continues_beyond_it(wide, tmp_path):
    with tersekv.compress(wide, START):
        cache = tersekv.CompressedCache(wide.config, START)
        read(wide, cache, [prompt(260), *singles(5)])
        goes_on_alike(wide, cache, tmp_path / "cache", [*singles(40, seed=2), prompt(70, seed=3)])


def test_several_processes(wide):
    one, *parts = same_as_one(wide, START, [prompt(250), *singles(60), prompt(40, seed=3)])
    assert sum(part.layers[0].store.packed_tokens for part in parts) == one.layers[0].store.packed_tokens > 0


def test_grammar():
    assert str(Recipe.parse(START)) == START
    for wrong in ("-1", "2.5", "1e3", "never"):
        with pytest.raises(UserError, match=f"start={wrong} is not a number of tokens; give 0 or more, or auto"):
            Recipe.parse(f"window:start={wrong}+int4")
    with pytest.raises(UserError, match="'snapkv' has no option 'start'"):
        Recipe.parse("snapkv:start=300+int4")
