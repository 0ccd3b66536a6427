"""Families that transformers added or changed lately: hybrids, shared keys, layers without RoPE.

Each must give the tokens of transformers' own cache, with every token in float32 in the packed
store.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
import transformers as tf

import tersekv
from conftest import HEAD, LOSSLESS, SHAPE, prompt
from tersekv.calibration.capture import capture, keys_before_rope
from tersekv.errors import UserError
from tersekv.hf.cache import CompressedLayer
from tersekv.models.config import AttentionShape, cache_shape, has_key_bias, text_config
from tersekv.models.rope import Ropes
from tersekv.sizes.estimate import predict
from tersekv.transforms.rope import NO_ROPE
from test_architectures import PAIR

SHORT = SHAPE | {"num_hidden_layers": 4}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
HYBRID = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
SHARED = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
MAMBA = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"], "num_local_experts": 2,
    "num_experts_per_tok": 1, "shared_intermediate_size": 32, "mamba_n_heads": 4, "mamba_d_state": 16,
    "mamba_chunk_size": 32, "attention_multiplier": 0.25,
}  # fmt: skip

RECENT = {
    "qwen3_5": lambda: tf.Qwen3_5ForCausalLM(tf.Qwen3_5TextConfig(**SHORT, **HEAD, **HYBRID)),
    "qwen3_5_moe": lambda: tf.Qwen3_5MoeForCausalLM(tf.Qwen3_5MoeTextConfig(**SHORT, **HEAD, **HYBRID, **EXPERTS)),
    "gemma3n": lambda: tf.Gemma3nForCausalLM(
        tf.Gemma3nTextConfig(**SHORT, **HEAD, **WINDOWS, **SHARED, laurel_rank=8)
    ),
    "gemma4": lambda: tf.Gemma4ForCausalLM(
        tf.Gemma4TextConfig(**SHORT, **HEAD, **WINDOWS, **SHARED, global_head_dim=32)
    ),
    "smollm3": lambda: tf.SmolLM3ForCausalLM(tf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1])),
    "granitemoehybrid": lambda: tf.GraniteMoeHybridForCausalLM(tf.GraniteMoeHybridConfig(**SHAPE, **MAMBA)),
    "cohere2": lambda: tf.Cohere2ForCausalLM(tf.Cohere2Config(**SHORT, **WINDOWS)),
}  # fmt: skip
WITHOUT_ROPE = {"smollm3": {1}, "granitemoehybrid": {1, 2}, "cohere2": {1, 3}}
"""Attention layers whose keys contain no position."""
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@functools.cache
def built(name: str) -> tf.PreTrainedModel:
    """Build a family once, with fixed random weights."""
    torch.manual_seed(0)
    model = RECENT[name]().eval()
    with torch.no_grad():  # large enough for attention that is far from uniform, and for clear greedy choices
        for weight, parameter in model.named_parameters():
            if any(part in weight for part in ("q_proj", "k_proj", "v_proj", "o_proj")):
                parameter.mul_(4)
    return model.requires_grad_(False)


def in_pieces(model, ids, cuts, cache):
    """Return the logits of a text that the model reads in pieces."""
    with torch.no_grad():
        return torch.cat([model(ids[:, a:b], past_key_values=cache).logits for a, b in itertools.pairwise(cuts)], 1)


@pytest.mark.parametrize("name", RECENT)
@pytest.mark.parametrize(("tokens", "padding"), [(1, 0), (100, 0), (100, 37)])
def test_greedy_tokens_equal(name, tokens, padding):
    """A short prompt, one beyond the windows, and a batch with padding on the left."""
    model, ids = built(name), prompt(tokens, batch=2 if padding else 1)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    kwargs = GREEDY | {"attention_mask": mask}
    expected = model.generate(ids * mask, **kwargs)
    with warnings.catch_warnings(), tersekv.compress(model, LOSSLESS):
        warnings.simplefilter("ignore")
        got = model.generate(ids * mask, **kwargs)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", RECENT)
def test_second_turn_equal(name):
    model, ids = built(name), prompt(70)
    with warnings.catch_warnings(), tersekv.compress(model, LOSSLESS):
        warnings.simplefilter("ignore")
        cache = tersekv.CompressedCache(model.config, LOSSLESS)
        first = model.generate(ids, past_key_values=cache, **GREEDY)
        second = torch.cat([first, prompt(30, seed=1)], dim=1)
        got = model.generate(second, past_key_values=cache, **GREEDY)
    own = tf.DynamicCache(config=model.config)
    assert first.tolist() == model.generate(ids, past_key_values=own, **GREEDY).tolist()
    assert got.tolist() == model.generate(second, past_key_values=own, **GREEDY).tolist()


@pytest.mark.parametrize("name", RECENT)
@pytest.mark.parametrize("recipe", [LOSSLESS, f"{LOSSLESS},pre_rope=true"])
def test_logits_equal_in_every_position(name, recipe):
    model, ids, cuts = built(name), prompt(120), [0, 80, 104, *range(105, 121)]
    expected = in_pieces(model, ids, cuts, tf.DynamicCache(config=model.config))
    with warnings.catch_warnings(), tersekv.compress(model, recipe):
        warnings.simplefilter("ignore")
        got = in_pieces(model, ids, cuts, tersekv.CompressedCache(model.config, recipe))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("name", RECENT)
def test_packed_attention_of_the_default_recipe(name):
    """Tokens are packed with the error of 3 bits, and attention over them equals attention over the
    same tokens decoded.

    No page is packed meanwhile, because packed attention reads a new page one step earlier.
    """
    model, ids = built(name), prompt(259)
    captured = capture(model, ids[:, :256])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tersekv.compress(model, "default"):
            cache = tersekv.CompressedCache(model, "default")
            in_pieces(model, ids, [0, 256], cache)
            held = [layer.store.decoded(torch.float32) for layer in cache.layers if isinstance(layer, CompressedLayer)]
            copied = copy.deepcopy(cache)
            packed = in_pieces(model, ids, range(256, 260), cache)
        decoded = in_pieces(model, ids, range(256, 260), copied)
    shape = replace(cache_shape(model.config), dtype=torch.float32)
    assert cache.footprint().parts["codes"] > 0
    assert cache.footprint().parts == predict(shape, "default", 259).parts
    torch.testing.assert_close(packed, decoded, atol=1e-4, rtol=1e-3)
    for layer, exact in zip(held, captured, strict=True):
        for got, expected in zip(layer, exact, strict=True):
            expected = expected[:, :, -got.shape[2] :]
            assert torch.linalg.norm(got - expected) < 0.15 * torch.linalg.norm(expected)


@pytest.mark.parametrize("name", RECENT)
def test_keys_before_rope_are_the_projected_ones(name):
    """Layers without RoPE keep their keys; others are rotated back."""
    model, ids, kept = built(name), prompt(60), []
    attention = [module for module in model.modules() if hasattr(module, "k_proj")]
    hooks = [
        getattr(module, "k_norm", module.k_proj).register_forward_hook(lambda module, args, out: kept.append(out))
        for module in attention
    ]
    with torch.no_grad():
        captured = [layer.keys[0] for layer in capture(model, ids)]
    for hook in hooks:
        hook.remove()
    found = keys_before_rope(model.config, captured)
    assert len(found) == len(kept)
    for keys, projected in zip(found, kept, strict=True):
        heads = projected[0].reshape(60, *(keys.shape[0], keys.shape[2])).transpose(0, 1)
        torch.testing.assert_close(keys, heads, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", RECENT)
def test_layers_without_rope_are_found(name):
    config = built(name).config
    ropes = Ropes(config, AttentionShape.of(config).key_dim)
    kinds = [i for i, kind in enumerate(config.layer_types) if kind != "linear_attention"]
    assert {i for i in kinds if ropes.of(i) is NO_ROPE} == WITHOUT_ROPE.get(name, set())


@pytest.mark.parametrize(
    ("kind", "more", "rotated"),
    [("lara_mini", {}, [0, 2]), ("olmo_hybrid", {}, [1]), ("olmo_hybrid", {"rope_theta": None}, [])],
)
def test_layers_that_get_no_angles_have_no_rope(kind, more, rotated):
    """Code of a model gives angles to layers of one type only; without a base there are none."""
    types = ["sliding_attention", "full_attention", "sliding_attention", "linear_attention"]
    types = types if kind == "lara_mini" else ["linear_attention", "full_attention"]
    config = tf.AutoConfig.for_model(kind, **SHORT | {"num_hidden_layers": len(types)}, **more, layer_types=types)
    ropes = Ropes(config, AttentionShape.of(config).key_dim)
    attention = [i for i, name in enumerate(types) if name != "linear_attention"]
    assert [i for i in attention if ropes.of(i) is not NO_ROPE] == rotated


def test_rope_of_a_broken_config_is_refused():
    """Errors of the model's own code become an error that says what to do."""
    config = tf.LlamaConfig(**SHAPE)
    config.rope_parameters = {"rope_type": "none such"}
    with pytest.raises(UserError, match=r"use pre_rope=false .* its RoPE raises KeyError"):
        Ropes(config, 16).of(0)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_policies_that_evict_are_refused_if_layers_share_keys(name):
    with pytest.raises(UserError, match=r"snapkv:budget=64\+kivi:group=16 on gemma(3n|4)_text: "):
        tersekv.CompressedCache(built(name).config, "snapkv:budget=64+kivi:group=16")


def test_layers_that_differ_in_their_heads_are_refused():
    """Full layers of Gemma 4 have other head dims than its sliding layers."""
    config = tf.Gemma4TextConfig(**SHORT, **HEAD, **WINDOWS, global_head_dim=64)
    with pytest.raises(UserError, match=r"gemma4_text differ in their heads or head dims; .*transformers' own cache"):
        tersekv.CompressedCache(config, "kivi")


MIMO = {
    "head_dim": 32, "v_head_dim": 16, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
    "num_key_value_heads": 1,
}  # fmt: skip


@pytest.mark.parametrize("recipe", ["kivi:bits=4,group=16", "default", "small"])
def test_layers_may_differ_in_their_key_value_heads(recipe, tmp_path):
    """Sliding layers of MiMo-V2-Flash have twice as many as the others. Files, pickles and estimates know."""
    torch.manual_seed(0)
    config = tf.MiMoV2FlashConfig(**SHORT | WINDOWS | MIMO)
    model, ids, path = tf.MiMoV2FlashForCausalLM(config).eval().requires_grad_(False), prompt(400), tmp_path / "cache"
    with tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model, recipe)
        in_pieces(model, ids, [0, 400], cache)
        cache.save(path)
        others = [tersekv.CompressedCache.load(path, model), pickle.loads(pickle.dumps(cache))]
        held = cache.footprint().parts
        expected = in_pieces(model, ids[:, :3], range(4), cache)
        for other in others:
            assert torch.equal(in_pieces(model, ids[:, :3], range(4), other), expected)
        exact = tersekv.CompressedCache(model, "exact")
        in_pieces(model, ids, [0, 400], exact)
        exact.save(path, storage=8)
        assert tersekv.CompressedCache.load(path, model).get_seq_length() == 400
    shape = replace(cache_shape(config), dtype=torch.float32)
    assert shape.heads == (2, 1, 2, 1)
    assert shape.elements(100) == (2 * 2 * 24 + 2 * 100) * (32 + 16)
    if recipe != "small":  # whose rates depend on the prompt
        assert held == predict(shape, recipe, 400).parts


NEMOTRON = {
    "layers_block_type": ["linear_attention", "full_attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16,
    "n_groups": 1, "ssm_state_size": 16, "use_mamba_kernels": False,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@pytest.mark.parametrize("name", ["nemotron_h", "gemma3"])
def test_generate_packs_where_the_model_does_not_name_the_cache(name):
    """Its `prepare_inputs_for_generation` takes **kwargs. Attention of Nemotron-H has no RoPE, though its file has."""
    shape = {k: v for k, v in SHAPE.items() if k != "num_hidden_layers"}
    if name == "nemotron_h":
        model = tf.NemotronHForCausalLM(tf.NemotronHConfig(**shape, **HEAD, **NEMOTRON))
    else:
        text = tf.Gemma3TextConfig(**SHAPE, **HEAD)
        model = tf.Gemma3ForConditionalGeneration(
            tf.Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=1)
        )
    with tersekv.compress(model.eval(), "default"):
        out = model.generate(prompt(300), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, tersekv.CompressedCache)
    assert out.past_key_values.footprint().parts["codes"]


@pytest.mark.parametrize("kind", ["exaone", "internlm3", "jamba"])
def test_configs_without_a_modelling_file_and_models_without_rope(kind):
    cache = tersekv.CompressedCache(tf.AutoConfig.for_model(kind), "default")
    assert cache.shape.passes_handles


def test_sarvam_passes_handles_as_deepseek_does():
    assert AttentionShape.of(tf.AutoConfig.for_model("sarvam_mla")).passes_handles


def test_models_that_read_layers_several_times_are_refused():
    config = tf.AutoConfig.for_model(
        "dory", num_hidden_layers=3, n_input_layers=1, n_recurrent_layers=1, n_output_layers=1, n_recurrent_loops=2
    )
    with pytest.raises(UserError, match=r"dory reads its layers several times for a token; .*own cache"):
        tersekv.CompressedCache(config, "kivi")


def test_layers_that_store_for_nobody_pass_handles():
    config = tf.AutoConfig.for_model("gemma4_unified_text", **SHORT, **HEAD, global_head_dim=32, num_kv_shared_layers=0)
    assert AttentionShape.of(config).passes_handles


def test_indexed_attention_is_refused():
    config = tf.Qwen4ExpTextConfig(**SHORT, **HEAD)
    with pytest.raises(UserError, match=r"qwen4_exp_text has layers of type 'indexed_attention'.*own cache"):
        tersekv.CompressedCache(config, "default")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (tf.LlamaConfig(**SHAPE), False),
        (tf.LlamaConfig(**SHAPE, attention_bias=True), True),
        (tf.Qwen2Config(**SHAPE), True),
        (tf.StableLmConfig(**SHAPE, use_qkv_bias=True), True),
        (tf.GPT2Config(n_embd=64, n_head=2, n_layer=1), True),
        (tf.GPTNeoXConfig(**SHAPE), True),
        (tf.BloomConfig(hidden_size=64, n_layer=1, n_head=2), True),
        (tf.WhisperConfig(**PAIR), False),
        (tf.Qwen3_5Config(text_config=tf.Qwen3_5TextConfig(**SHORT, **HEAD, **HYBRID).to_dict()), False),
        (tf.Gemma3TextConfig(**SHAPE, **HEAD), False),
        (tf.BertConfig(), True),
        (tf.PreTrainedConfig(), None),
    ],
)  # fmt: skip
def test_key_bias_is_read_from_the_config(config, expected):
    assert has_key_bias(config) is expected


def test_key_bias_of_a_compressed_model():
    """Its config names our attention, which other processes do not know. The config stays as it is."""
    model = built("smollm3")
    with tersekv.compress(model, "kivi:group=16"):
        assert has_key_bias(model.config) is False
        assert text_config(model.config)._attn_implementation == "tersekv"
