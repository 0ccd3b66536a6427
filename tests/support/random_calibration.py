"""Calibrations fitted on random tokens, without a model. Imports neither transformers nor hypothesis."""

from __future__ import annotations

import torch

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
