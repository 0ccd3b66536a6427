"""Simulation: every key and value is quantised in one forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from conftest import LOSSLESS, MODELS, prompt
from tersekv import CacheError
from tersekv.hf.simulate import SimulatedCache
from tersekv.recipe import Recipe


@pytest.mark.parametrize("name", MODELS)
def test_simulation_without_loss_is_the_ordinary_pass(models, name: str) -> None:
    model, ids = models[name], prompt(100)
    with torch.no_grad():
        cache = SimulatedCache(model.config, LOSSLESS)
        simulated = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(simulated, model(input_ids=ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["kivi:bits=2", "qjl", "turboquant:bits=3", "kivi:bits=4;0=exact"])
def test_simulation_is_attention_over_coded_tensors(llama, recipe: str) -> None:
    """Compare with quantisation inside the attention function. 96 tokens are whole blocks."""
    ids, layers = prompt(96), llama.config.num_hidden_layers

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        plan = Recipe.parse(recipe).plan(module.layer_idx, layers)
        coded = []
        for codec, x in ((plan.keys, key.half().float()), (plan.values, value.half().float())):
            fitted = codec.fit(x)
            coded.append(fitted.decode(fitted.encode(x), x.shape[-1]))
        return tf.integrations.sdpa_attention.sdpa_attention_forward(module, query, *coded, *args, **kwargs)

    tf.AttentionInterface.register("coded", attend)
    before = llama.config._attn_implementation
    try:
        llama.config._attn_implementation = "coded"
        with torch.no_grad():
            wanted = llama(input_ids=ids, use_cache=False).logits
    finally:
        llama.config._attn_implementation = before
        tf.AttentionInterface._global_mapping.pop("coded")
    cache = SimulatedCache(llama.config, recipe)
    with torch.no_grad():
        simulated = llama(input_ids=ids, past_key_values=cache, use_cache=True).logits
        assert not torch.allclose(simulated, llama(input_ids=ids).logits, atol=1e-4)
    torch.testing.assert_close(simulated, wanted)


def test_simulation_counts_what_it_encoded(llama) -> None:
    cache = SimulatedCache(llama.config, "kivi:bits=2", sinks=4)
    with torch.no_grad():
        llama(input_ids=prompt(101), past_key_values=cache, use_cache=True)
    held = cache.footprint()
    elements = 101 * 3 * 2 * 2 * 32  # three layers, keys and values, two heads, 32 channels
    assert (held.tokens, held.elements) == (101, elements)
    assert held.parts["exact sinks"] == elements // 101 * 4 * 2
    coded_bits = (held.parts["codes"] + held.parts["scales and norms"]) * 8 / (elements / 101 * 97)
    assert coded_bits == pytest.approx(Recipe.parse("kivi:bits=2").plan(0, 3).keys.true_bits(32), rel=1e-3)
    assert held.parts["tables"] == 16
    assert held.parts["exact window"] == held.parts["slack"] == 0


def test_simulated_tokens(llama) -> None:
    """Sinks are exact, the last block is coded as if complete, and chunks are those of the store."""
    cache = SimulatedCache(llama.config, "kivi:bits=2", sinks=3)
    keys, values = torch.randn(1, 2, 1100, 32), torch.randn(1, 2, 1100, 32)
    coded = cache.layers[1].update(keys, values)
    plan = Recipe.parse("kivi:bits=2").plan(1, 3)
    for codec, x, got in zip((plan.keys, plan.values), (keys, values), coded, strict=True):
        half = x.half().float()
        assert torch.equal(got[:, :, :3], half[:, :, :3])
        filled = torch.cat([half[:, :, 3:], half[:, :, -1:].expand(-1, -1, -1097 % 32, -1)], dim=2)
        assert torch.equal(got[:, :, 3:], codec.decode(codec.encode(filled), 32)[:, :, :1097])
    with pytest.raises(CacheError, match="got tokens twice"):
        cache.layers[1].update(keys, values)
    with pytest.raises(CacheError, match="layer 0: keys or values are not finite in float16"):
        cache.layers[0].update(keys * 1e6, values)


def test_simulation_with_only_sinks(llama) -> None:
    cache = SimulatedCache(llama.config, "qjl", sinks=64)
    with torch.no_grad():
        llama(input_ids=prompt(20), past_key_values=cache, use_cache=True)
    assert cache.footprint().bits_per_element == 16
