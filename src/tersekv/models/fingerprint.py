"""Hashes that identify a model: of its architecture, and of a sample of every weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tersekv.models.config import text_config

FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "layer_types",
    "sliding_window",
    "rope_parameters",
)
"""Fields of a config that affect keys and values."""

SAMPLED = 1024
"""Most elements read from each weight."""


def architecture(config: PreTrainedConfig) -> str:
    """Return the SHA-256 in hex of the fields of a config that affect keys and values."""
    config = text_config(config)
    fields: dict[str, Any] = {name: getattr(config, name, None) for name in FIELDS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Return the SHA-256 in hex of the architecture and of up to `SAMPLED` evenly spaced elements
    of every weight.

    Elements are read as bfloat16 and what float16 keeps of it, so that the hash does not depend on the type a model is
    loaded in. Of PEFT's adapters it tells which are active. Sharded weights are gathered one by one, so all processes
    must call this function.
    """
    digest = hashlib.sha256(architecture(model.config).encode())
    weights = {name: weight for name, weight in _weights(model) if not weight.is_meta}
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
    for name, module in model.named_modules():
        if isinstance(disabled := getattr(module, "disable_adapters", None), bool):  # a layer of PEFT
            state = (getattr(module, "active_adapters", None), getattr(module, "scaling", None), disabled)
            digest.update(f"{name} {state}".encode())
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for weight in weights.values():
        sample = _sample(weight)
        by_device.setdefault(sample.device, []).append(sample)
    for parts in by_device.values():  # one transfer for each device
        read = torch.cat(parts).cpu().to(torch.float16).to(torch.bfloat16)
        digest.update(read.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield all parameters by name, also those that Accelerate keeps elsewhere between calls.

    A tied parameter is yielded once, by the name of the one it is tied to. Accelerate makes several objects of it.
    """
    tied = getattr(model, "all_tied_weights_keys", {})
    for name, weight in model.named_parameters(remove_duplicate=False):
        if name in tied:
            continue
        place, _, own = name.rpartition(".")
        hook = getattr(model.get_submodule(place), "_hf_hook", None) if weight.is_meta else None
        maps = [getattr(each, "weights_map", None) for each in getattr(hook, "hooks", [hook])]
        yield name, next((held[own] for held in maps if held is not None), weight)


def _sample(weight: Any) -> torch.Tensor:
    """Return sampled elements as a copy, so that a gathered weight can be freed. Of a quantised weight that consists
    of several tensors, return elements of each."""
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    if hasattr(weight, "__tensor_flatten__"):
        return torch.cat([_sample(getattr(weight, name)) for name in weight.__tensor_flatten__()[0]])
    return weight.reshape(-1)[:: max(1, weight.numel() // SAMPLED)][:SAMPLED].to(torch.bfloat16, copy=True)
