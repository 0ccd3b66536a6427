"""`tersekv list`: show the methods with paper, true bits, the data they are fitted on, and their
kernels."""

from __future__ import annotations

import math
from typing import Any

from tersekv.cli import output

LAYERS = {64: 30, 128: 32}
"""Layers by head dim: SmolLM2-135M and Llama-3.1-8B. A method may spend more bits on the first layers."""


def list_methods(as_json: output.Json = False) -> None:
    """List the methods with paper, true bits, required fit, kernels and options."""
    with output.step("loading the methods"):
        rows = describe()
    if as_json:
        output.print_json({"methods": rows, "policies": describe_policies()})
        return
    bits = [f"bits, head dim {d}\nkeys / values / mean" for d in LAYERS]
    columns = ("recipe", "paper", "fitted on", "kernels", *bits)
    cells = [
        (
            row["name"],
            f"{row['title']}, {row['paper']}" if row["paper"] else row["title"],
            row["fits_on"] or "-",
            row["kernels"],
            *(_bits(row["bits"][str(d)]) for d in LAYERS),
        )
        for row in rows
    ]
    from tersekv.recipe import PRESETS, written

    presets = ", ".join(f"{name} is {coder}" for name, coder in PRESETS.items())
    output.show(output.table("methods", columns, cells, left=4))
    for title, described in (("methods", rows), ("token policies", describe_policies())):
        options = [
            (r["name"], " ".join(f"{k}={written(v)}" for k, v in r["options"].items()) or "-") for r in described
        ]
        output.show(output.table(f"options of {title} and their defaults", ("recipe", "options"), options, left=2))
    layers = ", ".join(f"{n} with head dim {d}" for d, n in LAYERS.items())
    output.show(
        "Bits are per key or value element at 4,096 tokens, with scales, norms, indices and tables, without the exact "
        f"tokens.\nThey are means over the layers of a model: {layers}.\nPresets: {presets}.\n"
        "Recipes: kivi:bits=2   qjl/uniform:bits=4 (keys / values)   window:sinks=8,recent=64+kivi:bits=4   "
        "kivi:bits=2;0-1=exact (layers)"
    )


def describe() -> list[dict[str, Any]]:
    """Return one row per method, with its default options."""
    from tersekv.codecs import methods

    rows = []
    for name, method in methods().items():
        pair = method.build()
        fits = sorted({str(codec.fits_on) for codec in (pair.keys, pair.values) if codec.fits_on})
        rows.append(
            {
                "name": name,
                "title": method.title,
                "paper": method.paper,
                "fits_on": ", ".join(fits) or None,
                "kernels": kernels_of(pair),
                "options": {option: parameter.default for option, parameter in method.parameters.items()},
                "bits": {str(d): _both_sides(name, layers, d) for d, layers in LAYERS.items()},
            }
        )
    return rows


def describe_policies() -> list[dict[str, Any]]:
    """Return one row per token policy, with its default options."""
    from tersekv.policies import policies

    return [
        {"name": name, "drops_tokens": policy.drops, "options": policy().options()}
        for name, policy in policies().items()
    ]


def _both_sides(recipe: str, layers: int, head_dim: int) -> dict[str, float]:
    """Return the mean bits of keys, of values and of both over the layers of a model."""
    from tersekv.recipe import Recipe

    plans = [Recipe.parse(recipe).plan(layer, layers) for layer in range(layers)]
    codecs = {codec for plan in plans for codec in (plan.keys, plan.values)}
    bits = {codec: codec.true_bits(head_dim) for codec in codecs}
    keys = sum(bits[plan.keys] for plan in plans) / layers
    values = sum(bits[plan.values] for plan in plans) / layers
    return {"keys": round(keys, 4), "values": round(values, 4), "mean": round((keys + values) / 2, 4)}


def _bits(sides: dict[str, float]) -> str:
    return f"{sides['keys']:.2f} / {sides['values']:.2f} / {sides['mean']:.2f}"


def kernels_of(pair: Any, head_dim: int = max(LAYERS)) -> str:
    """Return the kernels that attend to packed tokens of this method, found by a test on a few
    tokens."""
    import torch

    from tersekv.attention.dispatch import explain

    tokens = math.lcm(*(codec.layout(head_dim).block_tokens for codec in (pair.keys, pair.values)))
    x = torch.linspace(-1, 1, tokens * head_dim).view(1, 1, tokens, head_dim)
    views = []
    for codec in (pair.keys, pair.values):
        fitted = codec.fit(x)
        views.append(fitted.view(fitted.encode(x), head_dim))
    return explain(views[0].inner, views[1].inner, head_dim)
