"""Every eviction policy in its folder, with several codecs, under transformers' operations on a
cache."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import tersekv
from conftest import MODELS as BUILD
from conftest import SHAPE, prompt
from tersekv.cache.layer import LayerStore
from tersekv.errors import CacheError, UserError
from tersekv.policies import policies

pytestmark = pytest.mark.usefixtures("scored_heads")

GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
DROPPING = [name for name, policy in policies().items() if policy.drops]
EVERY = [*DROPPING, "subgen:variant=stream"]
CODECS = ["kivi:bits=4", "polarquant", "qjl/int4:group=32"]
ALL = "budget=4096,recent=32,exact=fp32+exact:dtype=fp32"
"""Options with which nothing is evicted or rounded, but all tokens are in the pools."""
MODELS = ["llama", "qwen2", "gemma2", "gemma3", "gpt_oss"]


def run(model, recipe, ids, **kwargs):
    kwargs = GREEDY | kwargs
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    with tersekv.compress(model, recipe):
        return model.generate(ids, return_dict_in_generate=True, output_logits=True, **kwargs)


def of(policy: str, options: str) -> str:
    """Return the policy with additional options."""
    return f"{policy}{',' if ':' in policy else ':'}{options}"


def full(name: str) -> str:
    """Return the policy's recipe that evicts nothing."""
    return f"{name}:{ALL}"


@pytest.mark.parametrize("policy", DROPPING)
@pytest.mark.parametrize(("tokens", "name"), [(1, "llama"), *((150, name) for name in MODELS)])
def test_greedy_with_room_for_all(models, name, policy, tokens):
    ids = prompt(tokens)
    expected = models[name].generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert run(models[name], full(policy), ids).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("policy", DROPPING)
@pytest.mark.parametrize(
    "kwargs",
    [{"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 64}, {"prompt_lookup_num_tokens": 5}],
    ids=["beam", "chunked", "assisted"],
)
def test_behaviours_with_room_for_all(llama, policy, kwargs):
    ids = prompt(40).repeat(1, 5)
    expected = llama.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY, **kwargs)
    assert run(llama, full(policy), ids, **kwargs).sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("policy", DROPPING)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_left_padded_batch_with_room_for_all(models, name, policy):
    ids, mask = prompt(150, batch=3), torch.ones(3, 150, dtype=torch.long)
    mask[0, :37] = mask[2, :3] = 0
    expected = models[name].generate(ids * mask, attention_mask=mask, **GREEDY)
    for kwargs in ({}, {"prefill_chunk_size": 32}):
        got = run(models[name], full(policy), ids * mask, attention_mask=mask, **kwargs)
        assert got.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("policy", DROPPING)
def test_several_turns_with_room_for_all(llama, policy):
    cache = tersekv.CompressedCache(llama.config, full(policy))
    first = run(llama, full(policy), prompt(120), past_key_values=cache).sequences
    second = torch.cat([first, prompt(90, seed=1)], dim=1)
    got = run(llama, full(policy), second, past_key_values=cache).sequences
    assert got.tolist() == llama.generate(second, attention_mask=torch.ones_like(second), **GREEDY).tolist()


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("codec", CODECS)
def test_every_policy_with_every_kind_of_codec(llama, policy, codec):
    """The prompt's logits are exact. Afterwards the cache is smaller, logits are finite, and turns
    continue."""
    recipe, ids = of(policy, f"budget=0.5,recent=16+{codec}"), prompt(300, batch=2)
    with tersekv.compress(llama, recipe), torch.no_grad():
        cache = tersekv.CompressedCache(llama.config, recipe)
        logits = llama(ids, past_key_values=cache).logits
        torch.testing.assert_close(logits, llama(ids, use_cache=False).logits, atol=2e-4, rtol=2e-3)
        held = cache.footprint()
        assert held.parts["codes"] > 0
        assert held.parts["selection"] > 0
        whole = tersekv.CompressedCache(llama.config, codec)
        with tersekv.compress(llama, codec):
            llama(ids, past_key_values=whole)
        assert held.total_bytes < 0.85 * whole.footprint().total_bytes
        for step in range(40):
            logits = llama(prompt(1, batch=2, seed=step), past_key_values=cache).logits
        assert torch.isfinite(logits).all()
        assert cache.get_seq_length() == 340
        logits = llama(prompt(100, batch=2, seed=9), past_key_values=cache).logits
        assert torch.isfinite(logits).all()
        assert cache.get_seq_length() == 440
        cache.crop(-3)
        assert cache.get_seq_length() == 437
        cache.batch_select_indices(torch.tensor([1]))
        assert torch.isfinite(llama(prompt(1), past_key_values=cache).logits).all()


@pytest.mark.parametrize("policy", EVERY)
def test_beams_keep_their_rows(llama, policy):
    out = run(llama, of(policy, "recent=16+kivi:bits=4"), prompt(200, batch=2), num_beams=3)
    assert out.sequences.shape == (2, 240)


@pytest.mark.parametrize("policy", DROPPING)
def test_padded_rows_get_the_logits_they_get_alone(llama, policy):
    recipe = of(policy, "budget=0.5,recent=16,exact=fp32+exact:dtype=fp32")
    ids, mask = prompt(200, batch=2), torch.ones(2, 200, dtype=torch.long)
    mask[0, :60] = 0
    together = run(llama, recipe, ids * mask, attention_mask=mask).logits
    for row, pad in ((0, 60), (1, 0)):
        alone = run(llama, recipe, ids[row : row + 1, pad:]).logits
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[row], b[0], atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("policy", EVERY)
def test_sliding_layers_are_not_evicted(models, policy):
    """They hold the tokens of the window; only the full-attention layer evicts."""
    model, recipe = models["gemma3"], of(policy, "budget=64,recent=16+kivi:bits=4")
    with tersekv.compress(model, recipe), torch.no_grad():
        cache = tersekv.CompressedCache(model.config, recipe)
        model(prompt(300), past_key_values=cache)
        model(prompt(1), past_key_values=cache)
    sliding, full = cache.layers[0].store, cache.layers[1].store
    assert isinstance(sliding, LayerStore)
    assert sliding.num_tokens - sliding.num_evicted >= 48
    assert sliding.footprint().parts["selection"] == 0 < full.footprint().parts["selection"]
    assert full.footprint().total_bytes < sliding.footprint().total_bytes


@pytest.mark.parametrize("policy", DROPPING)
def test_output_attentions(llama, policy):
    recipe, ids = of(policy, "budget=100,recent=16+kivi:bits=4"), prompt(200)
    with tersekv.compress(llama, recipe), torch.no_grad():
        cache = llama(ids).past_key_values
        weights = llama(prompt(2), past_key_values=cache, output_attentions=True).attentions
    for layer, held in zip(weights, cache.layers, strict=True):
        assert layer.shape == (1, 4, 2, 202)
        torch.testing.assert_close(layer.sum(-1), torch.ones(1, 4, 2))
        budget = int(held.store.chosen[0]._head_budget()[0, 0])
        assert budget - 2 < (layer[0, 0, 1] > 0).sum() <= budget + 2 < 200


@pytest.mark.parametrize("policy", EVERY)
def test_unsupported_attention_is_refused(models, llama, policy):
    """Without our attention, and where a model's own code reads keys, an error is raised."""
    recipe = f"{policy}+kivi:bits=4"
    cache = tersekv.CompressedCache(llama.config, recipe)
    with (
        pytest.raises(UserError, match="read by tersekv's attention only"),
        pytest.warns(UserWarning, match="is not installed"),
    ):
        llama.generate(prompt(50), past_key_values=cache, **GREEDY)
    with pytest.raises(UserError, match="on deepseek_v3: its cache holds one latent per token"):
        tersekv.CompressedCache(models["deepseek_v3"].config, recipe)
    torch.manual_seed(0)
    diff = tf.DiffLlamaForCausalLM(tf.DiffLlamaConfig(**SHAPE)).eval()
    with pytest.raises(UserError, match="read by tersekv's attention only"), tersekv.compress(diff, f"{policy}+exact"):
        diff.generate(prompt(50), **GREEDY)


@pytest.mark.parametrize("policy", DROPPING)
def test_more_proposals_than_can_be_rolled_back(llama, policy):
    recipe = of(policy, "recent=8,sinks=0,budget=0.5+kivi")
    with tersekv.compress(llama, recipe), torch.no_grad():
        cache = llama(prompt(200)).past_key_values
        with pytest.raises(CacheError, match="layer 0: cannot roll back 190 tokens"):
            cache.crop(-190)


@pytest.mark.parametrize("policy", EVERY)
def test_other_types_modes_and_devices(policy):
    """bfloat16 weights, inference mode, gradients, and a cache that is moved to another device and
    back."""
    torch.manual_seed(0)
    model = BUILD["llama"]().to(torch.bfloat16).eval()
    recipe = of(policy, "budget=0.5,recent=16+kivi:bits=4")
    with tersekv.compress(model, recipe):
        with torch.inference_mode():
            cache = model(prompt(200)).past_key_values
            model(prompt(1), past_key_values=cache)
        embeds = model.get_input_embeddings()(prompt(40)).detach().requires_grad_(True)
        model(inputs_embeds=embeds, past_key_values=cache).logits.float().sum().backward()
        assert torch.isfinite(embeds.grad).all()
        for layer in cache.layers:
            assert layer.store.recent.keys.dtype == torch.bfloat16
            assert not any(x.requires_grad for held in layer.store.chosen[0].slots for x in held.slots.fields.values())
            layer.offload()
            layer.prefetch()
        with torch.no_grad():
            assert torch.isfinite(model(prompt(1), past_key_values=cache).logits).all()
        cache.reset()
        assert cache.get_seq_length() == 0
