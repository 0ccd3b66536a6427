"""Gradients and attention dropout over a compressed cache: as with transformers' cache, or refused."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from transformers import DynamicCache

import tersekv
from conftest import LOSSLESS, build, prompt
from tersekv.attention.past import is_readable
from tersekv.cache.parallel import ContextParallel
from tersekv.errors import CacheError, UserError
from test_context_parallel import divided

NAMES = ["llama", "gemma2", "gemma3", "gpt_oss", "mistral", "deepseek_v3"]
CUTS = {"one token": [200, 201], "a chunk": [200, 230], "several": [200, 230, 231, 232, 250]}


@pytest.fixture(scope="module")
def trainable():
    """Return models whose weights require gradients."""
    made = {name: build(name) for name in NAMES}
    for model in made.values():
        model.requires_grad_(True)
    return made


def gradients(model, recipe, cuts):
    """Return the gradients of every weight for the summed losses of consecutive calls with one
    cache.

    The first tokens are read without gradients.
    """
    model.zero_grad()
    ids = prompt(cuts[-1])
    cache = DynamicCache(config=model.config) if recipe is None else tersekv.CompressedCache(model.config, recipe)
    with contextlib.nullcontext() if recipe is None else tersekv.compress(model, recipe):
        with torch.no_grad():
            model(ids[:, : cuts[0]], past_key_values=cache)
        losses = [
            model(ids[:, start:stop], past_key_values=cache).logits.square().mean()
            for start, stop in itertools.pairwise(cuts)
        ]
        sum(losses).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:CompressedCache decodes")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", ["one token", "a chunk"])
def test_gradients_are_those_of_transformers(trainable, name, cuts):
    """Every weight has one, including k_proj and v_proj."""
    expected, got = (gradients(trainable[name], recipe, CUTS[cuts]) for recipe in (None, LOSSLESS))
    assert {n for n, g in got.items() if g is None} == {n for n, g in expected.items() if g is None}
    for key, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(got[key], gradient, atol=1e-6, rtol=2e-3)


@pytest.mark.filterwarnings("ignore:CompressedCache decodes")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize(
    "recipe", [LOSSLESS, "window:exact=fp32,recent=16+kivi:bits=4", "h2o:budget=64,exact=fp32+exact:dtype=fp32"]
)
def test_later_calls_change_no_gradient(trainable, name, recipe):
    """Several calls are followed by one backward pass, over exact tokens that later calls move.

    Gradients are the sum of those of each call with its own cache.
    """
    if recipe.startswith("h2o") and name == "deepseek_v3":
        pytest.skip("this model reads keys and values itself")
    model, ids = trainable[name], prompt(250)
    got = gradients(model, recipe, CUTS["several"])
    sums = dict.fromkeys(got, 0)
    for index in range(1, len(CUTS["several"])):
        model.zero_grad()
        cache = tersekv.CompressedCache(model.config, recipe)
        with tersekv.compress(model, recipe):
            with torch.no_grad():
                for start, stop in itertools.pairwise([0, *CUTS["several"][:index]]):
                    model(ids[:, start:stop], past_key_values=cache)
            start, stop = CUTS["several"][index - 1 : index + 1]
            model(ids[:, start:stop], past_key_values=cache).logits.square().mean().backward()
        sums = {n: sums[n] + p.grad for n, p in model.named_parameters() if p.grad is not None}
    for key, total in sums.items():
        torch.testing.assert_close(got[key], total, atol=1e-6, rtol=2e-3)


def test_a_context_parallel_cache_refuses_training(trainable):
    """Its forward pass works without `torch.no_grad()`; the backward pass raises an error with the
    reason."""
    model = trainable["llama"]
    with tersekv.compress(model, LOSSLESS):
        cache = divided(model, LOSSLESS, ContextParallel(0, 1, lambda x: [x]))
        with torch.no_grad():
            model(prompt(90), past_key_values=cache)
        assert cache.layers[0].store.context_parallel is not None
        logits = model(prompt(2), past_key_values=cache).logits
        with pytest.raises(CacheError, match="gradients do not flow through a filled cache with context_parallel"):
            logits.sum().backward()


# ---------------------------------------------------------------- dropout


def run(model, context, cuts, cache):
    """Return the logits of calls in training mode, with the same random numbers each time."""
    ids, out = prompt(cuts[-1]), []
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.4
    torch.manual_seed(11)
    try:
        model.train()
        with context, torch.no_grad():
            for start, stop in itertools.pairwise(cuts):
                out.append(model(ids[:, start:stop], past_key_values=cache, use_cache=cache is not None).logits)
    finally:
        model.eval()
    return torch.cat(out, 1)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("cuts", [[0, 45], [0, 20, 44, 45]])
@pytest.mark.parametrize("cached", [True, False])
def test_dropout_with_softcaps_and_sinks(models, name, cuts, cached):
    """The same weights are dropped as by eager attention. No token leaves a window, so both draw
    alike."""
    if not cached and len(cuts) > 2:
        pytest.skip("one call only")
    model = models[name]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    expected = run(model, contextlib.nullcontext(), cuts, DynamicCache(config=model.config))
    model.set_attn_implementation(before)
    cache = tersekv.CompressedCache(model.config, LOSSLESS) if cached else None
    got = run(model, tersekv.compress(model, LOSSLESS), cuts, cache)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-3)
    plain = model(prompt(cuts[-1])).logits
    assert (got - plain).abs().max() > 0.01


@pytest.mark.parametrize("cuts", [[0, 60], [0, 60, 90], [0, 60, 61]])
def test_dropout_over_a_filled_cache(models, cuts):
    model = models["llama"]
    expected = run(model, contextlib.nullcontext(), cuts, DynamicCache(config=model.config))
    got = run(model, tersekv.compress(model, LOSSLESS), cuts, tersekv.CompressedCache(model.config, LOSSLESS))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-3)


def test_dropout_with_evicted_tokens_is_refused(models):
    model, recipe = models["llama"], "h2o:budget=32+kivi:bits=4"
    cache = tersekv.CompressedCache(model.config, recipe)
    with pytest.raises(UserError, match=r"attention dropout over a filled cache with h2o.*call model\.eval\(\)"):
        run(model, tersekv.compress(model, recipe), [0, 60, 61], cache)
    assert not is_readable(cache.layers[0].store)
