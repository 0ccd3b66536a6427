"""`fingerprint`: equal for one model however it is loaded, and different for another one."""

from __future__ import annotations

from types import SimpleNamespace

import accelerate
import pytest
import torch

from conftest import build
from tersekv.models.fingerprint import fingerprint


def test_the_type_does_not_matter():
    """float16 rounds small weights of a bfloat16 checkpoint."""
    model = build("llama").to(torch.bfloat16)
    for weight in model.parameters():
        weight[..., ::2] *= 1e-6
    mark = fingerprint(model)
    assert fingerprint(model.float()) == mark
    assert fingerprint(model.to(torch.float16)) == mark
    assert fingerprint(model.to(torch.bfloat16)) == mark


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("gemma2", True)])
def test_weights_that_are_kept_elsewhere_count(name, tied):
    whole, other = build(name), build(name)
    assert whole.config.tie_word_embeddings is tied
    other.model.layers[1].self_attn.k_proj.weight[0] *= 2
    marks = [fingerprint(model) for model in (whole, other)]
    assert marks[0] != marks[1]
    for model, mark in zip((whole, other), marks, strict=True):
        accelerate.cpu_offload(model, execution_device="cpu")
        assert all(weight.is_meta for weight in model.parameters())
        assert fingerprint(model) == mark


def test_each_tensor_of_a_quantised_weight_counts():
    """As torchao has them, whose weights have no views."""
    model = build("llama")
    parts = {"codes": torch.arange(6, dtype=torch.int8), "scale": torch.ones(2)}
    weight = SimpleNamespace(
        __tensor_flatten__=lambda: (list(parts), None), shape=(2, 3), is_meta=False, device=torch.device("cpu"), **parts
    )
    model.named_parameters = lambda **_: [("weight", weight)]
    marks = [fingerprint(model)]
    for name in parts:
        getattr(weight, name)[1] += 1
        marks.append(fingerprint(model))
    assert len(set(marks)) == 3


@pytest.mark.parametrize("change", [{"active_adapters": ["b"]}, {"disable_adapters": True}, {"scaling": {"a": 2.0}}])
def test_the_active_adapter_counts(change):
    """As layers of PEFT name it."""
    model = build("llama")
    layer = model.model.layers[0].self_attn.k_proj
    state = {"active_adapters": ["a"], "disable_adapters": False, "scaling": {"a": 1.0}}
    layer.__dict__.update(state)
    mark = fingerprint(model)
    layer.__dict__.update(change)
    assert fingerprint(model) != mark
