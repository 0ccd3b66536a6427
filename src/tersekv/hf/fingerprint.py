"""What a calibration knows a model by: its architecture, and a sample of every weight."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from tersekv.hf.config import text_config

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
"""The fields of a config that shape keys and values."""

SAMPLED = 1024
"""Elements read of each weight."""


def architecture(config: PreTrainedConfig) -> str:
    """sha256 in hex of the fields of a config that shape keys and values."""
    config = text_config(config)
    fields: dict[str, Any] = {name: getattr(config, name, None) for name in FIELDS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """sha256 in hex of the architecture and of elements at even distances in every weight, up to `SAMPLED` of each.

    They are read as bfloat16, so that a model is known again whatever type it is loaded in. Weights that processes
    have divided are gathered one by one, by all of them.
    """
    digest = hashlib.sha256(architecture(model.config).encode())
    weights = {name: weight for name, weight in model.named_parameters() if not weight.is_meta}
    for name, weight in weights.items():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for weight in weights.values():
        sample = _sample(weight)
        by_device.setdefault(sample.device, []).append(sample)
    for parts in by_device.values():  # one transfer for each device
        digest.update(torch.cat(parts).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _sample(weight: Any) -> torch.Tensor:
    """A copy, so that a gathered weight is not kept for it."""
    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return weight.reshape(-1)[:: max(1, weight.numel() // SAMPLED)][:SAMPLED].to(torch.bfloat16, copy=True)
