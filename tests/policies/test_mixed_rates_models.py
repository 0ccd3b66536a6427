"""The policy `mixed` under transformers' operations on a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import transformers as tf

import tersekv
from conftest import SHAPE, prompt
from tersekv.cache.layer import LayerStore
from tersekv.codecs import methods, registered
from tersekv.codecs.exact import ExactView
from tersekv.errors import CacheError, UserError
from tersekv.layouts.base import Layout, PackedTensors
from tersekv.layouts.exact import exact_layout
from tersekv.models.config import cache_shape
from tersekv.sizes.estimate import predict
from test_context_parallel import divided, together
from test_prompt_packing import same_tokens, two_padded_turns
from test_saved import goes_on_alike, read, singles
from test_saved import wide as wide
from test_transformers import GREEDY


@dataclass(frozen=True)
class Lossless(tersekv.codecs.Codec):
    """Floats at every rate."""

    bits: float = 4

    def layout(self, head_dim: int) -> Layout:
        return exact_layout(head_dim, torch.float32)

    def encode(self, x: torch.Tensor) -> PackedTensors:
        return {"x": x.unflatten(2, (-1, 32))}

    def view(self, planes: PackedTensors, head_dim: int) -> ExactView:
        return ExactView(planes)

    def at_rate(self, bits: float) -> Lossless:
        return replace(self, bits=bits)


@pytest.fixture(scope="module", autouse=True)
def lossless() -> Iterator[None]:
    """Register the codec for this file's tests."""
    tersekv.register_codec("lossless", Lossless)
    yield
    del registered["lossless"]
    methods.cache_clear()


LOSSLESS = "mixed:recent=20,exact=fp32+lossless"
RECIPES = ["mixed:recent=20+kivi:bits=4", "mixed:recent=20,budget=0.5,rest=1+trellis:bits=3,calibration=prompt"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prefill_chunk_size": 160}, {"prompt_lookup_num_tokens": 5}],
    ids=["greedy", "beam", "chunked", "assisted"],
)
@pytest.mark.filterwarnings("ignore")
def test_transformers_tokens(models, name, options):
    cache = same_tokens(models[name], LOSSLESS, options)
    full = next(layer.store for layer in cache.layers if layer.sliding_window is None)
    assert full.ranked
    assert full.packed_tokens >= 128
    sliding = [layer.store for layer in cache.layers if layer.sliding_window is not None]
    assert all(type(store) is LayerStore for store in sliding)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.filterwarnings("ignore")
def test_padded_batch_and_turns(models, name):
    two_padded_turns(models[name], LOSSLESS)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["wide", "gemma3"])
def test_a_cache_can_be_saved_and_is_what_the_estimate_says(models, wide, recipe, name, tmp_path):
    model = wide if name == "wide" else models[name]
    with tersekv.compress(model, recipe), torch.no_grad():
        cache = tersekv.CompressedCache(model.config, recipe)
        logits = read(model, cache, [prompt(300), *singles(70)])
        assert all(torch.isfinite(x).all() for x in logits)
        shape = replace(cache_shape(model.config), dtype=torch.float32)
        assert cache.footprint().parts == predict(shape, recipe, 370, generated=70).parts
        goes_on_alike(model, cache, tmp_path / "cache", [*singles(36, seed=2), prompt(170, seed=3), *singles(3)])


@pytest.mark.parametrize("recipe", RECIPES)
def test_other_types_modes_and_devices(recipe):
    """bfloat16 weights, gradients, attention weights, and a cache that is moved to another device."""
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE | {"num_hidden_layers": 2}, head_dim=64)).eval()
    model = model.to(torch.bfloat16)
    with tersekv.compress(model, recipe):
        with torch.inference_mode():
            cache = model(prompt(300)).past_key_values
            seen = model(prompt(2), past_key_values=cache, output_attentions=True).attentions
        assert all(x.shape == (1, 4, 2, 302) and bool((x[0, :, 1] > 0).all()) for x in seen)
        embeds = model.get_input_embeddings()(prompt(40)).detach().requires_grad_(True)
        model(inputs_embeds=embeds, past_key_values=cache).logits.float().sum().backward()
        assert torch.isfinite(embeds.grad).all()
        with torch.no_grad():
            for layer in cache.layers:
                layer.offload()
                layer.prefetch()
            assert torch.isfinite(model(prompt(1), past_key_values=cache).logits).all()
        with pytest.raises(CacheError, match="layer 0: cannot roll back 200 of 343 tokens"):
            cache.crop(-200)
        cache.crop(-343)
        assert cache.get_seq_length() == 0


def test_what_cannot_see_queries_is_refused(models, llama):
    cache = tersekv.CompressedCache(llama.config, LOSSLESS)
    with (
        pytest.raises(UserError, match="layer 0: the policy mixed ranks tokens by queries"),
        pytest.warns(UserWarning, match="is not installed"),
    ):
        llama.generate(prompt(250), past_key_values=cache, **GREEDY)
    own = tf.DiffLlamaForCausalLM(tf.DiffLlamaConfig(**SHAPE)).eval()
    with (
        pytest.raises(UserError, match="the model's own code reads keys and values, a recipe without"),
        tersekv.compress(own, "small"),
    ):
        own.generate(prompt(300), **GREEDY)
    with pytest.warns(UserWarning, match="outside of attention"), tersekv.compress(own, "default"):
        assert own.generate(prompt(300), **GREEDY).shape == (1, 320)
    with pytest.raises(UserError, match="on deepseek_v3: its cache holds one latent per token"):
        tersekv.CompressedCache(models["deepseek_v3"].config, LOSSLESS)
    with pytest.raises(UserError, match="the policy ranks all tokens of a prompt"):
        together(1, lambda spread: read(llama, divided(llama, LOSSLESS, spread), [prompt(9)]))
