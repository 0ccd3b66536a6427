"""Published models by name: transformers configs with the same shapes give the same caches and
parameter counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tersekv.models.config import cache_shape
from tersekv.sizes.known_models import LATENT_MODELS, MODELS, KnownModel, find, names, near

# Counted from the published checkpoints by keras-team/keras-hub (gemma3_presets.py,
# qwen3_presets.py). Its Gemma has no rows for the 64 image tokens of the configs from 4B on.
PUBLISHED = {
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_099_328 + 64 * 2560,
    "gemma-3-12b": 11_765_788_416 + 64 * 3840,
    "gemma-3-27b": 27_009_002_240 + 64 * 5376,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


def config_of(model: KnownModel) -> Any:
    window = {} if model.kind == "qwen2" else {"sliding_window": model.window}  # Qwen 2.5 does not use its window
    return AutoConfig.for_model(
        model.kind,
        num_hidden_layers=model.layers,
        num_attention_heads=model.query_heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        hidden_size=model.hidden,
        intermediate_size=model.mlp,
        vocab_size=model.vocabulary,
        tie_word_embeddings=model.tied,
        **window,
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_config_with_these_shapes_has_the_same_cache(name: str) -> None:
    """Gemma's pattern of sliding windows comes from the config, not from us."""
    model = MODELS[name]
    config = config_of(model)
    assert cache_shape(config) == model.shape
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in network.parameters()) == model.parameters
    assert model.parameters == PUBLISHED.get(name, model.parameters)


def test_windows() -> None:
    """Gemma 3 alternates five layers with a sliding window and one without. Mistral 7B had windows
    in its first release."""
    windows = MODELS["gemma-3-1b"].shape.windows
    assert windows[:7] == (512,) * 5 + (None, 512)
    assert sum(window is None for window in MODELS["gemma-3-27b"].shape.windows) == 10
    assert set(MODELS["mistral-7b-v0.1"].shape.windows) == {4096}
    assert set(MODELS["mistral-7b-v0.3"].shape.windows) == {None}


def test_find() -> None:
    assert find("Llama-3.1-8B") is find("meta-llama/llama-3.1-8b") is MODELS["llama-3.1-8b"]
    assert find("llama-3.1-9b") is None
    assert near("lama-3.1-8b")[0] == "llama-3.1-8b"
    assert near("Qwen/Qwen3-4B-Instruct-2507")[0] == "qwen3-4b"
    assert near("gpt2") == []
    assert "llama-65b" in names()


LATENT_FIELDS = {
    "deepseek-v2-lite": {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "vocab_size": 102400,
    },
    "kimi-k2": {
        "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "n_routed_experts": 384,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
"""Fields of config.json that are not the defaults of transformers' config."""


@pytest.mark.parametrize("name", LATENT_MODELS)
def test_latent_models_have_the_cache_and_the_weights_of_their_configs(name: str) -> None:
    model = LATENT_MODELS[name]
    config = AutoConfig.for_model(model.kind, **LATENT_FIELDS.get(name, {}))
    assert dataclasses.replace(cache_shape(config), dtype=torch.bfloat16) == model.shape
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in network.parameters()) == model.parameters
