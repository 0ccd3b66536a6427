"""Calibrations fitted on random tokens, without a model. Importing it imports neither transformers nor hypothesis."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tersekv.calibration.calibration import Calibration, Made
from tersekv.recipe import Recipe


def calibration(recipe: str, layers: int, H: int, D: int, seed: int = 0) -> Calibration:
    """Fit the codecs of a recipe on random tokens whose scales differ from layer to layer."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(layers):
        plan = Recipe.parse(recipe).plan(layer, layers)
        for codec in (plan.keys, plan.values):
            if codec.needs_fit == "corpus":
                x, gradient = (torch.randn(1, H, 300, D, generator=generator) for _ in range(2))
                fitted = codec.for_all_rates().fit_corpus(x * (layer + 1) * scales(D), gradient).fitted
                kept = {name: t for name, t in fitted.items() if name not in codec.rate_tensors}
                tensors |= {f"layers.{layer}.{codec.side}.{name}": t for name, t in kept.items()}
    return Calibration(Made(recipe, "0" * 64, "0" * 64, "random", "0" * 64, 1, 300, seed, 0), tensors)


def scales(D: int) -> torch.Tensor:
    """Return the scales of channels."""
    return torch.linspace(0.2, 2, D)


def stored_model(folder: Path, seed: int = 0) -> tuple[dict[str, str], Tensor]:
    """Write a model's config and a storage calibration to a folder; return the serde's options for them, and the
    vectors before RoPE [2, 3, 512, 128] that the calibration is fitted on.
    """
    from transformers import LlamaConfig

    from tersekv.calibration.storage_basis import NAME, SIDES
    from tersekv.models.fingerprint import architecture
    from tersekv.storage.basis import Sums, fitted, plain_metric

    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    mean, mixed = torch.randn(2, 1, 384, generator=generator), torch.randn(2, 24, 384, generator=generator)
    x = mean + torch.randn(2, 512, 24, generator=generator) @ mixed / 5
    sums = [Sums.of(side) for side in x]
    tensors = {
        f"groups.0.{side}.{name}": tensor.contiguous()
        for side, own in zip(SIDES, sums, strict=True)
        for name, tensor in fitted(own, plain_metric(own, 3, 64))._asdict().items()
    }
    made = Made(NAME, architecture(config), "0" * 64, "random", "0" * 64, 64, 512, seed, 0)
    Calibration(made, tensors).save(folder / "storage.safetensors")
    options = {"model": str(folder), "calibration": str(folder / "storage.safetensors")}
    return options, x.unflatten(2, (3, 128)).transpose(1, 2)
