"""Latent attention: every family whose modules have `expand_kv`, compared with transformers' own cache.

The queries absorb the up-projection, so attention reads one head of cached latents.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import itertools
import warnings

import pytest
import torch
import transformers as tf
from torch._dynamo.utils import counters

import tersekv
from conftest import LOSSLESS, SHAPE, prompt
from tersekv.errors import UserError
from tersekv.hf import latent
from tersekv.hf.latent import UpProjection
from tersekv.kernels import backends
from tersekv.models.config import cache_shape
from tersekv.sizes.estimate import predict

CPU = torch.device("cpu")
SIZES = SHAPE | {
    "num_key_value_heads": 4, "kv_lora_rank": 48, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
    "v_head_dim": 20, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
LONGCAT = {
    "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32,
    "zero_expert_num": 2, "moe_topk": 2, "head_dim": 16,
}  # fmt: skip
INDEXED = {"index_topk": 16, "index_n_heads": 2, "index_head_dim": 32}
"""Queries read 16 tokens that an indexer chooses."""

DOTS = INDEXED | {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "sliding_window": 24}
DOTS |= {"head_dim": 40, "swa_head_dim": 40, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
DOTS |= {f"swa_{name}": SIZES[name] for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim")}
IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
"""An encoder of images, which no test uses."""
MISTRAL = {"vision_config": IMAGES | {"model_type": "pixtral", "head_dim": 16, "image_size": 32}}
HY = {"vision_config": IMAGES | {"out_hidden_size": 64, "max_image_size": 64}}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}

LATENT = {
    "axk1": ("AXK1ForCausalLM", {}),
    "axk2": ("AXK2ForCausalLM", INDEXED),
    "bailing_hybrid": ("BailingHybridForCausalLM", HYBRID),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {"q_lora_rank": None}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", INDEXED),
    "dots3_note": ("Dots3NoteForCausalLM", DOTS),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", INDEXED | {"indexer_types": ["full", "shared", "full"]}),
    "hy_v4": ("HYV4ForCausalLM", INDEXED),
    "hy_v4_vl": ("HYV4VLForConditionalGeneration", HY | {"text_config": SIZES | INDEXED | ROPE}),
    "kimi_linear": ("KimiLinearForCausalLM", HYBRID),
    "longcat_flash": ("LongcatFlashForCausalLM", LONGCAT),
    "minicpm3": ("MiniCPM3ForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", MISTRAL | {"text_config": SIZES | INDEXED}),
    "youtu": ("YoutuForCausalLM", {}),
}
"""Class and fields of the config of families beside deepseek_v3, which conftest.py builds."""

GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


@functools.cache
def built(name: str) -> tf.PreTrainedModel:
    """Build a family once, with fixed random weights."""
    made, fields = LATENT[name]
    made = getattr(importlib.import_module(f"transformers.models.{name}.modeling_{name}"), made)
    torch.manual_seed(0)
    fields = fields if "text_config" in fields else SIZES | fields
    model = made(made.config_class(**fields)).eval()
    with torch.no_grad():  # large enough for attention that is far from uniform
        for weight, parameter in model.named_parameters():
            if "attn" in weight and parameter.dim() == 2:
                parameter.mul_(4)
    return model.requires_grad_(False)


def logits(model, ids, cuts, cache, **kwargs):
    """Return the logits of a text that the model reads in pieces."""
    with torch.no_grad():
        return torch.cat([model(ids[:, a:b], cache=cache, **kwargs).logits for a, b in itertools.pairwise(cuts)], 1)


@pytest.mark.parametrize("name", LATENT)
def test_logits_equal_in_every_position(name):
    """A prompt, a chunk of many queries and single tokens, all with the same latents."""
    model, ids, cuts = built(name), prompt(130), [0, 70, 122, *range(123, 131)]
    expected = logits(model, ids, cuts, tf.DynamicCache(config=model.config))
    with warnings.catch_warnings(), tersekv.compress(model, LOSSLESS):
        warnings.simplefilter("error")  # nothing is decoded
        got = logits(model, ids, cuts, tersekv.CompressedCache(model.config, LOSSLESS))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-3)


def test_no_storage_file_without_the_keys_of_the_indexer(tmp_path):
    model = built("deepseek_v32")
    cache = tersekv.CompressedCache(model, "exact")
    with tersekv.compress(model, cache):
        model(prompt(90), cache=cache)
    with pytest.raises(tersekv.UserError, match="indexer of deepseek_v32 has keys that no storage file holds"):
        cache.save(tmp_path / "a", storage=4)


@pytest.mark.parametrize("name", LATENT)
def test_left_padded_beams_equal(name):
    model, ids = built(name), prompt(90, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    kwargs = GREEDY | {"attention_mask": mask, "num_beams": 2}
    expected = model.generate(ids * mask, **kwargs)
    with warnings.catch_warnings(), tersekv.compress(model, LOSSLESS):
        warnings.simplefilter("error")
        assert model.generate(ids * mask, **kwargs).tolist() == expected.tolist()


PACKED = [
    "default", "safe", "kivi:bits=4", "turboquant", "trellis:bits=4,calibration=prompt", "uniform:bits=3",
    "kivi:bits=4;1=exact:dtype=bf16", "window:found=3,exact=fp32+uniform:bits=8",
    "exact/turboquant:bits=3,rotation=hadamard", "oscar:calibration=prompt",
]  # fmt: skip


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("recipe", PACKED)
def test_packed_attention_reads_what_is_decoded(models, recipe, backend):
    """Attention over packed latents equals the model's own over the same latents decoded."""
    model, ids = models["deepseek_v3"], prompt(420, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :40] = 0
    with backends.forced(backend), tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model, recipe)
        logits(model, ids, [0, 400], cache, attention_mask=mask[:, :400])
        copied = copy.deepcopy(cache)
        steps = [logits(model, ids, cuts, cache, attention_mask=mask[:, : cuts[-1]]) for cuts in STEPS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoded = [logits(model, ids, cuts, copied, attention_mask=mask[:, : cuts[-1]]) for cuts in STEPS]
    assert cache.footprint().parts["codes"] > 0
    for got, expected in zip(steps, decoded, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-3)


STEPS = [[400, 401], [401, 404], [404, 410]]
"""A token, and several tokens at once."""


@pytest.mark.parametrize("recipe", ["kivi:bits=4,group=16", "turboquant", "default"])
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_the_estimate_is_what_is_held(models, name, recipe):
    """A latent is held once, for keys and values."""
    model = models[name] if name in models else built(name)
    with tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model, recipe)
        logits(model, prompt(400), [0, 400], cache)
    shape = dataclasses.replace(cache_shape(model.config), dtype=torch.float32)
    assert cache.footprint().to_dict() == predict(shape, recipe, 400).to_dict()
    sides = shape.key_dim + shape.value_dim + sum(shape.index_dims[:1])
    assert cache.footprint().elements == 3 * 400 * sides


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32"])
def test_assisted_decoding_equal(models, name):
    """Draft tokens are rolled back, in layers with an indexer, too."""
    model, ids = models[name] if name in models else built(name), prompt(70)
    kwargs = GREEDY | {"attention_mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 3, "max_new_tokens": 16}
    expected = model.generate(ids, **kwargs)
    with tersekv.compress(model, LOSSLESS):
        assert model.generate(ids, **kwargs).tolist() == expected.tolist()


@pytest.mark.parametrize("recipe", [LOSSLESS, "uniform:group=16", "turboquant"])
@pytest.mark.parametrize("name", ["deepseek_v3", "glm_moe_dsa"])
def test_a_loaded_and_cropped_cache_continues(models, name, recipe, tmp_path):
    """A file, a copy, other rows and a rollback hold latents and the indexer's keys."""
    model, ids = models[name] if name in models else built(name), prompt(300, batch=2)
    with tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model, recipe)
        logits(model, ids, [0, 270], cache)
        expected = logits(model, ids, [270, 274, 275], copy.deepcopy(cache))
        cache.save(tmp_path / "cache", ids[:, :270])
        loaded = tersekv.CompressedCache.load(tmp_path / "cache", model, ids[:, :270])
        assert torch.equal(logits(model, ids, [270, 274, 275], loaded), expected)
        loaded.crop(-5)
        torch.testing.assert_close(logits(model, ids, [270, 274, 275], loaded), expected, atol=1e-5, rtol=1e-4)
        cache.reorder_cache(torch.tensor([1, 1]))
        turned = logits(model, ids[[1, 1]], [270, 274, 275], cache)
        torch.testing.assert_close(turned, expected[[1, 1]], atol=1e-5, rtol=1e-4)


def test_an_interrupted_call_leaves_no_keys_of_the_indexer():
    model, ids = built("deepseek_v32"), prompt(60)
    with tersekv.compress(model, LOSSLESS):
        cache, whole = (tersekv.CompressedCache(model, LOSSLESS) for _ in range(2))
        logits(model, ids, [0, 50], cache)
        expected = logits(model, ids, [0, 50, 60], whole)[:, 50:]
        hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, 50:60], cache=cache)
        hook.remove()
        cache.crop(-10)
        torch.testing.assert_close(logits(model, ids, [50, 60], cache), expected, atol=1e-5, rtol=1e-4)


def test_a_quantised_projection_is_dequantised():
    """A module of another class is asked for the image of each unit vector, again when its weights have changed."""
    model = built("youtu")
    attention = model.model.layers[0].self_attn
    plain = UpProjection.of(attention, CPU)
    kept = plain.keys.clone()

    class Quantised(torch.nn.Linear):
        """Stands for a layer with packed weights."""

    linear, attention.kv_b_proj = attention.kv_b_proj, Quantised(1, 1, bias=False)
    attention.kv_b_proj.in_features, attention.kv_b_proj.weight = linear.in_features, linear.weight
    try:
        for got, expected in zip(UpProjection.of(attention, CPU), plain, strict=True):
            torch.testing.assert_close(got, expected)
        linear.weight.requires_grad_(True)
        assert UpProjection.of(attention, CPU).keys.requires_grad  # of adapters, for example
        with torch.no_grad():
            UpProjection.of(attention, CPU)
            linear.weight.mul_(2)  # as a step of training does
            torch.testing.assert_close(UpProjection.of(attention, CPU).keys, 2 * kept)
        latent.uninstall()
        assert not latent._weights
    finally:
        attention.kv_b_proj = linear
        linear.weight.requires_grad_(False)
        with torch.no_grad():
            linear.weight.div_(2)


def test_weights_that_are_elsewhere_until_a_module_is_called(models):
    """As accelerate offloads them: they are on the meta device between calls."""
    model, ids = models["deepseek_v3"], prompt(40)
    with tersekv.compress(model, "kivi:bits=4"), torch.no_grad():
        expected = model.generate(ids, max_new_tokens=3, do_sample=False)
        hooks = []
        for layer in model.model.layers:
            linear = layer.self_attn.kv_b_proj
            kept, gone = linear.weight, torch.nn.Parameter(linear.weight.to("meta"))
            linear.weight = gone
            hooks.append((linear, kept, linear.register_forward_pre_hook(lambda m, _, w=kept: setattr(m, "weight", w))))
            hooks.append((linear, kept, linear.register_forward_hook(lambda m, *_, w=gone: setattr(m, "weight", w))))
        try:
            assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
        finally:
            for linear, kept, hook in hooks:
                hook.remove()
                linear.weight = kept


def test_what_cannot_work_is_refused(models):
    config = models["deepseek_v3"].config
    for recipe in ("h2o+kivi:bits=4", "mixed+kivi:bits=4", "window:bias_correction=full+kivi:bits=4", "small"):
        with pytest.raises(UserError, match="its cache holds one latent per token for all heads"):
            tersekv.CompressedCache(config, recipe)
    for recipe in ("trellis:bits=3", "oscar", "kvquant:bits=3"):
        with pytest.raises(UserError, match="its cache holds latents; use calibration=prompt"):
            tersekv.compress(models["deepseek_v3"], recipe)
    with pytest.raises(UserError, match="group=64 does not divide the head dim 32"):
        tersekv.CompressedCache(config, "kivi:group=64")
    sizes = SIZES | INDEXED
    for made, fields, text in (
        ("Dots3NoteTextConfig", {"num_hidden_layers": 4}, "differ in their heads"),
        ("Glm5NextTextConfig", {"qk_rope_head_dim": 0, "index_kpool": 4, "num_hidden_layers": 4}, "indexed_attention"),
        ("MistralLarge4TextConfig", {"kv_source_layers": [0, 0, 2]}, "with an indexer and the latents of another"),
    ):
        module = {"Dots": "dots3_note", "Glm5": "glm5_next", "Mist": "mistral_large4"}[made[:4]]
        made = getattr(importlib.import_module(f"transformers.models.{module}.configuration_{module}"), made)
        with pytest.raises(UserError, match=text):
            tersekv.CompressedCache(made(**(sizes | fields)), "kivi:bits=4")


def test_classes_are_restored(models):
    model = models["deepseek_v3"]
    made = type(model.model.layers[0].self_attn)
    before = made.expand_kv
    with tersekv.compress(model, "kivi"):
        assert made.expand_kv is not before
        copied = copy.deepcopy(model)
    assert made.expand_kv is before
    ids = prompt(40)
    torch.testing.assert_close(copied(ids).logits, model(ids).logits)


@pytest.mark.parametrize("recipe", [LOSSLESS, "uniform:bits=8,group=16"])
def test_compiled_steps_give_eager_tokens(recipe):
    """A compiled step absorbs its queries outside the operator that reads the cache."""
    torch.compiler.reset()
    counters.clear()
    model = copy.deepcopy(built("minicpm3"))
    inputs = {"input_ids": prompt(60, batch=2), "attention_mask": torch.ones(2, 60, dtype=torch.long)}
    compiled = tf.CompileConfig(fullgraph=True, backend="eager", mode=None)
    compiled._compile_all_devices = True
    with tersekv.compress(model, recipe):
        expected = model.generate(**inputs, **(GREEDY | {"max_new_tokens": 110}))
        got = model.generate(**inputs, **(GREEDY | {"max_new_tokens": 110}), compile_config=compiled)
    assert got.tolist() == expected.tolist()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
