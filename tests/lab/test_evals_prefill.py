"""Caches filled from one shared prefill."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import tersekv
from conftest import MODELS, prompt
from tersekv.errors import UserError
from tersekv.hf.prefill import Prefill, held_by, new_cache
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.reader import Reader
from tersekv.models.loading import load


@pytest.mark.parametrize(
    "recipe",
    [
        *("kivi:bits=2,group=16", "qjl:outliers=4,value_group=0", "turboquant", "polarquant"),
        *("window:sinks=0,recent=16+int4:group=16", "kivi:bits=4,group=16,pre_rope=true"),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_shared_prefill_has_the_bytes_of_a_real_one(models, name: str, recipe: str) -> None:
    model, ids = models[name], prompt(200)
    filled, real = new_cache(model, recipe), new_cache(model, recipe)
    with tersekv.compress(model, recipe), torch.no_grad():
        model(input_ids=ids, past_key_values=real)
        # inside, because the model's own attention rounds softcaps and attention sinks differently
        Prefill(model).fill(filled, ids)
    for ours, theirs in zip(filled.layers, real.layers, strict=True):
        if theirs.store is None:
            assert ours.store is None
            continue
        assert (ours.store.num_tokens, ours.store.num_evicted) == (theirs.store.num_tokens, theirs.store.num_evicted)
        for held, other in ((ours.store.sinks, theirs.store.sinks), (ours.store.recent, theirs.store.recent)):
            assert all(map(torch.equal, held.data, other.data))
        for a, b in zip(ours.store.sides, theirs.store.sides, strict=True):
            planes, wanted = a.packed.planes(), b.packed.planes()
            assert all(torch.equal(planes[key].view(torch.uint8), wanted[key].view(torch.uint8)) for key in wanted)
    assert held_by(filled) == held_by(real)


def test_shared_prefill_fills_the_full_cache_with_sliding_windows(models) -> None:
    model, ids = models["gemma2"], prompt(200)
    filled, real = new_cache(model, None), new_cache(model, None)
    Prefill(model).fill(filled, ids)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=real)
        nexts = [model(input_ids=ids[:, :1], past_key_values=cache).logits for cache in (filled, real)]
    assert torch.equal(*nexts)


def test_prefill_is_computed_once_per_prompt(llama) -> None:
    calls = []
    hook = llama.base_model.register_forward_hook(lambda *_: calls.append(1))
    try:
        prefill = Prefill(llama)
        for ids in (prompt(40), prompt(40).clone(), prompt(41), prompt(40)):
            prefill.fill(new_cache(llama, "kivi"), ids)
    finally:
        hook.remove()
    assert len(calls) == 3


@pytest.mark.parametrize(
    "recipe",
    [
        *("snapkv:budget=0.3,window=8,recent=8+kivi:bits=4,group=16", "h2o:budget=0.3,recent=8+exact"),
        "pyramidkv:budget=60,window=8,recent=8+exact",
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_policies_that_observe_queries_share_the_prefill(models, name: str, recipe: str) -> None:
    """Tokens and bytes are those of the recipe's own prefill."""
    model, ids = models[name], prompt(200)
    try:
        filled, real = new_cache(model, recipe), new_cache(model, recipe)
    except UserError:
        pytest.skip("no eviction policy supports this model")
    before = model.config.get_text_config()._attn_implementation
    with tersekv.compress(model, recipe), torch.no_grad():
        model(input_ids=ids, past_key_values=real)
        Prefill(model).fill(filled, ids)
        nexts = [model(input_ids=ids[:, :1], past_key_values=cache).logits for cache in (filled, real)]
    assert model.config.get_text_config()._attn_implementation == before
    for ours, theirs in zip(filled.layers, real.layers, strict=True):
        if theirs.store.by_head:
            assert torch.equal(*(held.store.chosen[0].positions(0) for held in (ours, theirs)))
    assert held_by(filled) == held_by(real)
    assert torch.equal(*nexts)


def test_queries_are_recorded_once_a_recipe_observes_them(tiny: str) -> None:
    """The first prompt needs one more prefill; afterwards one serves all recipes. Answers do not
    change."""
    model, tokenizer = load(tiny)
    calls: list[int] = []
    hook = model.base_model.register_forward_hook(lambda module, args, out: calls.append(1))
    try:
        prefill = Prefill(model)
        for ids in (prompt(40), prompt(41)):
            for recipe in (None, "snapkv:budget=20+exact", "h2o:budget=20+exact"):
                prefill.fill(new_cache(model, recipe), ids)
    finally:
        hook.remove()
    assert len(calls) == 3
    ask = Prompt("A cache keeps keys and values. " * 8, "Why?")
    alone, shared = (Reader(model, tokenizer, "snapkv:budget=0.5+exact", p) for p in (None, prefill))
    assert shared.answer(ask, 8) == alone.answer(ask, 8)


def test_a_full_cache_of_sliding_windows_has_its_own_bits(models):
    """Its layers hold one token less than a window, and a compressed cache is measured on the same elements."""
    model = models["gemma3"]
    cache = tf.DynamicCache(config=model.config)
    packed = tersekv.CompressedCache(model, "exact")
    with torch.no_grad():
        for ids in (prompt(200), prompt(1)):
            model(ids, past_key_values=cache)
            with tersekv.compress(model, "exact"):
                model(ids, past_key_values=packed)
    assert held_by(cache).elements == packed.footprint().elements
    assert 31.6 < held_by(cache).bits_per_element <= 32
