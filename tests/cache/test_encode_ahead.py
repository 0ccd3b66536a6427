"""One step's block is encoded for all layers in few calls, and no layer packs what it would not have packed alone."""

from __future__ import annotations

import pytest
import torch

import tersekv
from conftest import prompt
from tersekv.cache import packing
from tersekv.codecs.base import Codec
from tersekv.errors import UserError

CASES = [
    ("llama", "kivi:bits=4"),
    ("llama", "window:recent=16+trellis:bits=2,calibration=prompt,basis=rotation"),
    ("llama", "kvquant:bits=3,calibration=prompt,value_axis=channel"),
    ("gemma3", "turboquant:bits=3"),
    ("gemma3", "default"),
]


def fed(model, recipe: str, tokens: int, batch: int = 1) -> tersekv.CompressedCache:
    """Return a cache after a prompt of 200 tokens and further ones, one by one."""
    cache, ids = tersekv.CompressedCache(model.config, recipe), prompt(tokens).expand(batch, -1)
    with tersekv.compress(model, recipe), torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        for i in range(200, tokens):
            model(ids[:, i : i + 1], past_key_values=cache)
    return cache


def held(cache: tersekv.CompressedCache) -> list[torch.Tensor]:
    """Return all packed tensors."""
    sides = [side for layer in cache.layers for tier in layer.store.tiers for side in tier.sides]
    return [plane for side in sides for plane in side.packed.planes().values()]


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_bytes_are_those_of_layers_alone(models, monkeypatch, name, recipe):
    got = held(fed(models[name], recipe, 270, batch=2))
    monkeypatch.setattr("tersekv.hf.layer.encode_ahead", lambda stores, n: None)
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

    def counted(stores, n):
        tried.append(n)
        packing.encode_ahead(stores, n)

    monkeypatch.setattr("tersekv.hf.layer.encode_ahead", counted)
    monkeypatch.setattr("tersekv.cache.coding.TOGETHER", 100)
    cache = fed(models["llama"], "window:recent=16+kivi:bits=4", 200 + 2 * 32)
    assert cache.layers[0].store.packed_tokens
    assert len(tried) == 2


@pytest.mark.parametrize("codec", ["trellis:bits=2,calibration=prompt", "kivi:bits=4"])
def test_steps_pack_and_are_read_under_autocast(models, codec):
    """Codecs compute outside autocast, which refuses some of their types. With gradients, packed tokens are decoded."""
    model, recipe = models["llama"], "window:recent=16+" + codec
    with torch.autocast("cpu", torch.bfloat16):
        cache = fed(model, recipe, 270)
        assert cache.layers[0].store.packed_tokens > 200
        x = model.get_input_embeddings()(prompt(1)).detach().requires_grad_()
        with tersekv.compress(model, recipe):
            model(inputs_embeds=x, past_key_values=cache).logits.sum().backward()
    assert x.grad.isfinite().all()


def test_tokens_of_another_crop_are_not_used(models, monkeypatch):
    """After an interrupted pass, a crop and other tokens, the bytes are those of the tokens held."""
    model, recipe = models["llama"], "window:recent=16+kivi:bits=4"
    fresh = fed(model, recipe, 270)
    monkeypatch.setattr("tersekv.hf.layer.encode_ahead", lambda stores, n: None)
    cache, stale = fed(model, recipe, 200), 0
    ids = prompt(270)
    with tersekv.compress(model, recipe), torch.no_grad():
        for i in range(200, 270):
            stores = [layer.store for layer in cache.layers]
            if stores[0].leaves(1):
                for store in stores:
                    for x in store.recent.data:
                        x.neg_()
                packing.encode_ahead(stores, 1)
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
