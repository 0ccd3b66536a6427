"""Activations and gradients of a calibration, compared with autograd at the key and value modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from conftest import HEAD, MODELS, SHAPE, prompt
from tersekv import CacheError
from tersekv.calibration.capture import capture, keys_before_rope
from tersekv.calibration.gradients import Source, layer_gradients

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 512}
ARCHITECTURES = ["llama", "qwen3", "gemma3", "yarn"]  # gemma3's layers have two rope types


def model_of(models: dict[str, Any], name: str) -> Any:
    if name != "yarn":
        return models[name]
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, **HEAD, rope_parameters=YARN)).eval()


def by_autograd(model: Any, ids: Tensor) -> dict[Source, tuple[Tensor, Tensor]]:
    """Return keys before RoPE and values [1, H, T, D] with the gradients of transformers' own loss."""
    made: dict[Source, Tensor] = {}

    def keep(source: Source, out: Tensor) -> None:
        out.retain_grad()
        made[source] = out

    hooks = []
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        keys, values = getattr(attention, "k_norm", attention.k_proj), attention.v_proj
        for module, source in ((keys, Source(i, "keys", True)), (values, Source(i, "values"))):
            hooks.append(module.register_forward_hook(lambda m, args, out, source=source: keep(source, out)))
    weight = model.get_input_embeddings().weight.requires_grad_(True)
    try:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    finally:
        weight.requires_grad_(False)
        weight.grad = None
        for hook in hooks:
            hook.remove()

    def heads(source: Source, x: Tensor) -> Tensor:
        if x.dim() == 4 and x.shape[1] == 2:  # gemma3 normalises the heads first
            return x
        return x.reshape(1, ids.shape[1], 2, 32).transpose(1, 2)

    return {s: (heads(s, x.detach()), heads(s, x.grad)) for s, x in made.items()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_those_of_autograd(models, name: str) -> None:
    model, ids = model_of(models, name), prompt(60)
    for p in model.parameters():
        p.requires_grad_(False)
    wanted = by_autograd(model, ids)
    assert len(wanted) == 6
    got = layer_gradients(model, ids, wanted, sinks=1)
    for source, (x, gradient) in wanted.items():
        kept, slope = got[f"{source.name}.x"], got[f"{source.name}.gradient"]
        assert (kept.dtype, slope.dtype) == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(kept, x[:, :, 1:], atol=1e-4, rtol=1e-4)
        assert float(gradient.abs().max()) > 0
        torch.testing.assert_close(slope.float(), gradient[:, :, 1:], atol=float(gradient.abs().max()) / 200, rtol=1e-2)


def test_yarn_gradients_need_the_transpose(models) -> None:
    """YaRN's factor on cos and sin makes the transpose differ from the inverse."""
    model, ids = model_of(models, "yarn"), prompt(60)
    before, after = Source(0, "keys", True), Source(0, "keys")
    got = layer_gradients(model, ids, [before, after])
    length = [got[f"{s.name}.gradient"].float().norm() for s in (before, after)]
    factor = 0.1 * torch.tensor(8.0).log() + 1
    assert float(length[0] / length[1]) == pytest.approx(float(factor), rel=1e-2)


def test_keys_after_rope_equal_the_caches_keys(llama) -> None:
    cache = tf.DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(input_ids=prompt(40), past_key_values=cache)
    got = layer_gradients(llama, prompt(40), [Source(1, "keys"), Source(2, "values")])
    torch.testing.assert_close(got["layers.1.keys.x"], cache.layers[1].keys)
    torch.testing.assert_close(got["layers.2.values.x"], cache.layers[2].values)
    assert set(got) == {f"layers.{s}.{part}" for s in ("1.keys", "2.values") for part in ("x", "gradient")}


def test_captured_keys_before_rope_are_those_of_the_key_module(models) -> None:
    """gemma3's layers have two rope types."""
    for name in ("llama", "gemma3"):
        model = models[name]
        keys = [layer.keys[0] for layer in capture(model, prompt(40))]
        wanted = layer_gradients(model, prompt(40), [Source(i, "keys", True) for i in range(len(keys))])
        for i, found in enumerate(keys_before_rope(model.config, keys)):
            torch.testing.assert_close(found, wanted[f"layers.{i}.keys.pre_rope.x"][0], atol=1e-5, rtol=1e-5)
            assert not torch.allclose(found, keys[i], atol=1e-2)


def test_model_is_unchanged() -> None:
    model = MODELS["llama"]()
    model.lm_head.weight.requires_grad_(False)
    learnt = {name: p.requires_grad for name, p in model.named_parameters()}
    with torch.no_grad():
        layer_gradients(model, prompt(20), [Source(0, "keys")])
    assert {name: p.requires_grad for name, p in model.named_parameters()} == learnt
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


def test_overflow_is_reported() -> None:
    model = MODELS["llama"]()
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.inf
    with pytest.raises(CacheError, match=r"layer 1: .*values hold NaN or Inf"):
        layer_gradients(model, prompt(20), [Source(1, "values")])
