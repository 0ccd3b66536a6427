"""Tokens of several layers are encoded in few calls, and no layer packs what it would not have packed alone."""

from __future__ import annotations

import copy

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.cache import together
from tersekv.cache.layer import LayerStore
from tersekv.codecs.base import Codec
from tersekv.errors import CacheError, UserError
from tersekv.hf import waiting

CASES = [
    ("llama", "kivi:bits=4"),
    ("llama", "window:recent=16+trellis:bits=2,calibration=prompt,basis=rotation"),
    ("llama", "kvquant:bits=3,calibration=prompt,value_axis=channel"),
    ("gemma3", "turboquant:bits=3"),
    ("gemma3", "default"),
]

RANKED = [
    ("llama", "small"),
    ("llama", "mixed:bias_correction=full,recent=16+trellis:bits=3,calibration=prompt"),
    ("llama", "mixed:allot=prompt,recent=16+turboquant:bits=3"),
    ("gemma3", "mixed:allot=prompt,recent=16+trellis:bits=2,calibration=prompt,pre_rope=true"),
]
"""Recipes with two rates. Not `CASES`, because blocks that leave the window are not encoded together."""


def fed(model, recipe: str, tokens: int, batch: int = 1) -> tersekv.CompressedCache:
    """Return a cache after a prompt of 200 tokens and further ones, one by one."""
    cache, ids = tersekv.CompressedCache(model.config, recipe), prompt(tokens).expand(batch, -1)
    with tersekv.compress(model, recipe), torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        for i in range(200, tokens):
            model(ids[:, i : i + 1], past_key_values=cache)
    return cache


def held(cache: tersekv.CompressedCache) -> list[torch.Tensor]:
    """Return all packed tensors, and what keys have lost."""
    sides = [side for layer in cache.layers for tier in layer.store.tiers for side in tier.sides]
    lost = [side.lost for side in sides if side.lost is not None]
    return [plane for side in sides for plane in side.packed.planes().values()] + lost


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_bytes_are_those_of_layers_alone(models, monkeypatch, name, recipe):
    got = held(fed(models[name], recipe, 270, batch=2))
    monkeypatch.setattr("tersekv.hf.layer.encode_ahead", lambda stores: None)
    expected = held(fed(models[name], recipe, 270, batch=2))
    assert same(got, expected)


def test_all_layers_share_a_call(models, monkeypatch):
    sizes: list[int] = []
    encode = Codec.encode_all.__func__

    def counted(cls, parts):
        sizes.append(len(parts))
        return encode(cls, parts)

    monkeypatch.setattr(Codec, "encode_all", classmethod(counted))
    cache = fed(models["llama"], "window:recent=16+turboquant", 270)
    assert set(sizes) == {len(cache.layers)}
    assert all(side.ahead is None for layer in cache.layers for side in layer.store.sides)


def test_layers_try_once_where_blocks_are_too_large(models, monkeypatch):
    tried: list[int] = []

    def counted(stores):
        tried.append(len(stores))
        together.encode_ahead(stores)

    monkeypatch.setattr("tersekv.hf.layer.encode_ahead", counted)
    monkeypatch.setattr("tersekv.cache.coding.TOGETHER", 100)
    cache = fed(models["llama"], "window:recent=16+kivi:bits=4", 200 + 2 * 32)
    assert cache.layers[0].store.packed_tokens
    assert len(tried) == 2


@pytest.mark.parametrize(
    ("recipe", "packed"),
    [
        ("window:recent=16+trellis:bits=2,calibration=prompt", 224),
        ("window:recent=16+kivi:bits=4", 224),
        ("mixed:recent=16+kivi:bits=4", 160),
    ],
)
def test_steps_pack_and_are_read_under_autocast(models, recipe, packed):
    """Codecs compute outside autocast, which refuses some of their types. With gradients, packed tokens are decoded."""
    model = models["llama"]
    with torch.autocast("cpu", torch.bfloat16):
        cache = fed(model, recipe, 270)
        assert cache.layers[0].store.packed_tokens == packed
        x = model.get_input_embeddings()(prompt(1)).detach().requires_grad_()
        with tersekv.compress(model, recipe):
            model(inputs_embeds=x, past_key_values=cache).logits.sum().backward()
    assert x.grad.isfinite().all()


def test_tokens_of_another_crop_are_not_used(models, monkeypatch):
    """After an interrupted pass, a crop and other tokens, the bytes are those of the tokens held."""
    model, recipe = models["llama"], "window:recent=16+kivi:bits=4"
    fresh = fed(model, recipe, 270)
    monkeypatch.setattr("tersekv.hf.layer.encode_ahead", lambda stores: None)
    cache, stale = fed(model, recipe, 200), 0
    ids = prompt(270)
    with tersekv.compress(model, recipe), torch.no_grad():
        for i in range(200, 270):
            stores = [layer.store for layer in cache.layers]
            if stores[0].leaves():
                for store in stores:
                    for x in store.recent.data:
                        x.neg_()
                together.encode_ahead(stores)
                stale += 1
                for store in stores:
                    for x in store.recent.data:
                        x.neg_()
            model(ids[:, i : i + 1], past_key_values=cache)
    assert stale
    assert same(held(cache), held(fresh))


def test_a_layer_names_its_own_error(models):
    model, recipe = models["llama"], "window:recent=16,exact=fp32+kivi:bits=4"
    cache, ids = fed(model, recipe, 200), prompt(270)
    cache.layers[1].store.recent.buffers[0].mul_(1e9)
    with tersekv.compress(model, recipe), torch.no_grad(), pytest.raises(UserError, match="layer 1: a scale"):
        model.generate(ids[:, :201], past_key_values=cache, max_new_tokens=60, min_new_tokens=60)


# ---------------------------------------------------------------- calls of several tokens


def read(model, recipe: str, parts, **options) -> tuple[tersekv.CompressedCache, torch.Tensor]:
    """Return a cache after a prompt in parts, and the last part's logits."""
    cache = tersekv.CompressedCache(model.config, recipe)
    with tersekv.compress(model, recipe), torch.no_grad():
        for ids in parts:
            logits = model(ids, past_key_values=cache, **options).logits
    return cache, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "recipe"), [*CASES, *RANKED, ("mistral", "kivi:bits=2"), ("deepseek_v3", "default")])
def test_a_prompt_and_its_second_turn_have_the_bytes_of_layers_alone(models, monkeypatch, name, recipe, dtype):
    groups = {"gemma3": [[0, 2]]}
    model, parts = copy.deepcopy(models[name]).to(dtype), prompt(450, batch=2).split([300, 150], 1)
    found, joins = [], []

    def counted(stores, calls):
        joins.append(len(stores))
        return together.encode_calls(stores, calls)

    monkeypatch.setattr("tersekv.hf.waiting.encode_calls", counted)
    for most in (1 << 21, 0):
        monkeypatch.setattr("tersekv.hf.waiting.MOST_WAITING", most)
        found.append(read(model, recipe, parts))
    (cache, got), (alone, expected) = found
    if not recipe.startswith("kvquant"):  # its outliers are those of all heads of a token
        assert joins == [len(group) for group in groups.get(name, [range(3)])] * 2
    assert same(held(cache), held(alone))
    assert torch.equal(got, expected)
    fitted = [[*side.codec.fitted.values()] for layer in cache.layers for side in layer.store.sides]
    assert all(t.untyped_storage().nbytes() == t.nbytes for tensors in fitted for t in tensors)
    assert all(side.ahead is None for layer in cache.layers for side in layer.store.sides)


def test_bits_that_no_rate_has_are_kept(models, monkeypatch):
    """A calibration or a file may hold other bits than those that the rate would choose again."""
    model, (first, then) = models["llama"], prompt(450).split([300, 150], 1)
    found = []
    for most in (1 << 21, 0):
        monkeypatch.setattr("tersekv.hf.waiting.MOST_WAITING", most)
        cache, _ = read(model, "small", [first])
        for side in (side for layer in cache.layers for side in layer.store.sides):
            side.codec.fitted["bits"] = side.codec.fitted["bits"].flip(-1)
        with tersekv.compress(model, cache), torch.no_grad():
            model(then, past_key_values=cache)
        found.append(held(cache))
    assert same(*found)


def test_a_padded_batch_is_packed_layer_by_layer(models, monkeypatch):
    model, ids, mask = models["llama"], prompt(300, batch=2), torch.ones(2, 300, dtype=torch.long)
    mask[1, :40] = 0
    found = []
    for most in (1 << 21, 0):
        monkeypatch.setattr("tersekv.hf.waiting.MOST_WAITING", most)
        cache, _ = read(model, "default", [ids], attention_mask=mask)
        found.append(held(cache))
    assert same(*found)


def test_groups_stay_small(models, monkeypatch):
    """Tokens that wait are exact, so there are never many of them."""
    model, sizes = models["llama"], []
    finish = waiting.Waiting.finish

    def counted(self):
        sizes.append(sum(call.keys.numel() for call in self.calls.values()))
        finish(self)

    monkeypatch.setattr(waiting.Waiting, "finish", counted)
    of_layer = 300 * 2 * 32
    monkeypatch.setattr(waiting, "MOST_WAITING", 2 * of_layer)
    assert len(model.model.layers) == 3
    read(model, "kivi:bits=4", [prompt(300)])
    assert sizes == [2 * of_layer, of_layer]


@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_a_layer_names_its_own_error_in_a_prompt(models, value):
    model = copy.deepcopy(models["llama"])
    model.model.layers[1].self_attn.k_proj.weight.data[3] = value
    with pytest.raises((UserError, CacheError), match=r"^layer 1: (keys or values hold NaN|a scale of)"):
        read(model, "window:recent=0,exact=fp32+kivi:bits=4", [prompt(300)])


def test_a_layer_that_is_read_again_is_packed_before(models):
    """A layer that shares the keys of another one reads them as they are stored."""
    model = models["llama"]
    last = model.model.layers[-1].self_attn
    seen: list[torch.Tensor] = []

    def look(module, args, kwargs):
        seen.append(handle.decoded())

    cache = tersekv.CompressedCache(model.config, "kivi:bits=4")
    update = cache.layers[0].update

    def kept(*args, **kwargs):
        nonlocal handle
        handle, values = update(*args, **kwargs)
        return handle, values

    handle = None
    cache.layers[0].update = kept
    hook = last.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with tersekv.compress(model, "kivi:bits=4"), torch.no_grad():
            model(prompt(300), past_key_values=cache)
    finally:
        hook.remove()
    assert torch.equal(seen[0], cache.layers[0].store.decoded(torch.float32)[0])


def test_an_error_leaves_no_tokens_of_other_layers(models, monkeypatch):
    model, append = models["llama"], LayerStore.append
    cache, calls = tersekv.CompressedCache(model.config, "kivi:bits=4"), []

    def fails(self, *args):
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError
        append(self, *args)

    monkeypatch.setattr(LayerStore, "append", fails)
    with tersekv.compress(model, cache), torch.no_grad(), pytest.raises(MemoryError):
        model(prompt(300), past_key_values=cache)
    assert len(calls) == 2
    assert all(side.ahead is None for layer in cache.layers for side in layer.store.sides)


def test_an_interrupted_encoding_serves_no_later_call(models, monkeypatch):
    """Bytes encoded for waiting calls are not compared with the tokens packed next, so they must be dropped."""
    model, recipe, ids = models["llama"], "kivi:bits=4", prompt(530)
    cache, first = read(model, recipe, [ids[:, :300]])[0], ids[:, :300]

    def interrupts(stores, calls):
        together.encode_calls(stores, calls)
        raise KeyboardInterrupt

    with tersekv.compress(model, recipe), torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr("tersekv.hf.waiting.encode_calls", interrupts)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 300:500], past_key_values=cache)
        monkeypatch.setattr("tersekv.hf.waiting.MOST_WAITING", 0)
        model(ids[:, 330:], past_key_values=cache)
    assert same(held(cache), held(read(model, recipe, [first, ids[:, 330:]])[0]))


def test_stores_are_made_for_the_prompt_that_they_get(models, monkeypatch):
    """Codecs depend on the length of the first prompt, not on one that was interrupted before anything was added."""
    model, recipe = models["llama"], "default"
    cache = tersekv.CompressedCache(model.config, recipe)
    with tersekv.compress(model, recipe), torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr("tersekv.hf.attention.attend_plain", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(prompt(200), past_key_values=cache)
        model(prompt(300), past_key_values=cache)
    assert [layer.first_tokens for layer in cache.layers] == [300] * 3


def interrupted(*args, **kwargs):
    raise KeyboardInterrupt
