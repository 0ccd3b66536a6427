"""Architectures with unusual windows, causal flags, layouts or layers."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers as tf

import tersekv
from conftest import HEAD, LOSSLESS, SHAPE, prompt
from tersekv.errors import UserError
from tersekv.models.config import attention_layers, text_config

PAIR = {
    "vocab_size": 97, "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "max_position_embeddings": 1024, "max_target_positions": 1024,
}  # fmt: skip
AUDIO = {"audio_vocab_size": 32, "ffn_dim": 64, "sliding_window": 48}
EXPERTS = {"num_dense_layers": 1, "moe_intermediate_size": 32, "num_experts": 2, "num_experts_per_tok": 1}

BUILD = {
    "moshi": lambda: tf.MoshiForCausalLM(tf.MoshiConfig(**SHAPE, **HEAD, **AUDIO)),
    "afmoe": lambda: tf.AfmoeForCausalLM(tf.AfmoeConfig(**SHAPE, **HEAD, **EXPERTS, sliding_window=48)),
    "whisper": lambda: tf.WhisperForCausalLM(tf.WhisperConfig(**PAIR)),
    "bart": lambda: tf.BartForCausalLM(tf.BartConfig(**PAIR)),
    "bigbird_pegasus": lambda: tf.BigBirdPegasusForCausalLM(tf.BigBirdPegasusConfig(**PAIR)),
}


def built(name):
    torch.manual_seed(0)
    return BUILD[name]().eval()


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("chunk", [300, 64])
def test_logits_are_those_of_one_pass(name, chunk):
    """Prefill in one piece or in chunks, then single tokens, far beyond any window."""
    model, ids = built(name), prompt(400)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with tersekv.compress(model, LOSSLESS):
            inside = model(ids, use_cache=False).logits
            cache = tersekv.CompressedCache(model.config, LOSSLESS)
            cuts = [*range(0, 300, chunk), *range(300, 401)]
            parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)]
    torch.testing.assert_close(inside, expected, atol=2e-4, rtol=2e-3)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-4, rtol=2e-3)


def test_config_window_is_ignored_if_the_masks_ignore_it():
    """Moshi's config has a window, but its only mask is causal. AFMoE's masks follow its window."""
    moshi, afmoe = (attention_layers(text_config(built(name).config)) for name in ("moshi", "afmoe"))
    assert {kind.window for kind in moshi} == {None}
    assert {kind.window for kind in afmoe} >= {48}


def test_generate_in_chunks_if_the_model_calls_view():
    model, ids = built("afmoe"), prompt(150)
    kwargs = {"prefill_chunk_size": 64, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **kwargs)
    with tersekv.compress(model, LOSSLESS):
        assert model.generate(ids, **kwargs).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_a_decoder_alone_has_its_own_number_of_layers(name):
    """The usual attribute of such a config is the encoder's number of layers."""
    model = built(name)
    cache = tersekv.CompressedCache(model.config, LOSSLESS)
    assert (len(cache.layers), cache.shape.layers, cache.shape.kv_heads, cache.shape.key_dim) == (3, 3, 4, 16)


def test_encoder_states_are_refused():
    model = built("whisper")
    with (
        tersekv.compress(model, LOSSLESS),
        pytest.raises(UserError, match="WhisperForCausalLM got states of an encoder"),
    ):
        model.generate(prompt(20), encoder_outputs=(torch.randn(1, 10, 64),), max_new_tokens=3)


def test_cross_attention_layers_are_refused():
    config = tf.MllamaConfig().text_config
    with pytest.raises(UserError, match="mllama_text_model has layers of cross-attention"):
        tersekv.CompressedCache(config, "kivi")


def test_mixed_recipes_on_layers_with_one_window(models):
    """Without packed attention one mask serves layers that have evicted different blocks."""
    model = models["mistral"]
    recipe = f"{LOSSLESS};0=uniform:bits=4,axis=channel,group=64"
    ids = prompt(620)
    with torch.no_grad():
        with tersekv.compress(model, recipe):
            inside = tersekv.CompressedCache(model.config, recipe)
            expected = [model(ids[:, i : i + 31], past_key_values=inside).logits for i in range(0, 620, 31)]
        cache = tersekv.CompressedCache(model.config, recipe)
        with pytest.warns(UserWarning, match="decodes all tokens"):
            got = [model(ids[:, i : i + 31], past_key_values=cache).logits for i in range(0, 620, 31)]
    assert len({layer.store.num_evicted for layer in cache.layers}) > 1
    torch.testing.assert_close(torch.cat(got, 1), torch.cat(expected, 1), atol=2e-4, rtol=2e-3)
