"""`tersekv list`: show the methods with paper, true bits, the data they are fitted on, and their
kernels, or one method with its options."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tersekv.cli import output
from tersekv.cli.bare import Cell
from tersekv.registry import sentences

LAYERS = {64: 30, 128: 32}
"""Layers by head dim: SmolLM2-135M and Llama-3.1-8B. A method may spend more bits on the first layers."""


NAME_HELP = "Method, token policy or preset whose options are shown, for example kivi or snapkv."

EVERY_METHOD = {
    "pre_rope": "keys are coded before RoPE, which is applied when they are read.",
    "centre": "the mean of keys before RoPE is removed, which models with key biases need.",
}
"""Options that every method has."""


def list_methods(
    name: Annotated[str | None, typer.Argument(help=NAME_HELP, show_default=False)] = None,
    as_json: output.Json = False,
) -> None:
    """List the methods with paper, true bits, required fit and kernels, and the token policies.

    With a name: what it does, what it is good and bad for, and its options.
    """
    with output.step("loading the methods"):
        document = {"methods": describe(), "policies": describe_policies()} if name is None else describe_one(name)
    if as_json:
        output.print_json(document)
    elif name is None:
        _show_all(document)
    else:
        _show_one(document, name)


def _show_all(document: dict[str, Any]) -> None:
    from tersekv.recipe import PRESETS

    bits = [f"bits, head dim {d}\nkeys / values / mean" for d in LAYERS]
    cells = [
        (
            row["name"],
            f"{row['title']}, {row['paper']}" if row["paper"] else row["title"],
            row["fits_on"] or "-",
            row["kernels"],
            *(_bits(row["bits"][str(d)], d) for d in LAYERS),
        )
        for row in document["methods"]
    ]
    output.show(output.table("methods", ("recipe", "paper", "fitted on", "kernels", *bits), cells, left=4))
    policies = [(row["name"], row["does"]) for row in document["policies"]]
    output.show(output.table("token policies", ("recipe", "what it does"), policies, left=2))
    layers = ", ".join(f"{n} with head dim {d}" for d, n in LAYERS.items())
    presets = ", ".join(f"{name} is {coder}" for name, coder in PRESETS.items())
    output.show(
        "Bits are per key or value element at 4,096 tokens, with scales, norms, indices and tables, without the exact "
        f"tokens.\nThey are means over the layers of a model: {layers}.\nPresets: {presets}.\n"
        "Recipes: kivi:bits=2   qjl/uniform:bits=4 (keys / values)   window:sinks=8,recent=64+kivi:bits=4   "
        "kivi:bits=2;0-1=exact (layers)\nOptions: tersekv list kivi"
    )


def _show_one(one: dict[str, Any], name: str) -> None:
    from tersekv.recipe import PRESETS, written

    output.show(f"{one['does']}\nGood for: {one['good_for']}\nBad for: {one['bad_for']}")
    if "bits" in one:
        each = "; ".join(f"{_bits(one['bits'][str(d)], d)} with head dim {d}" for d in LAYERS)
        output.show(f"Bits of keys / values / mean: {each}. Fitted on: {one['fits_on'] or 'nothing'}.")
        output.show(f"Kernels: {one['kernels']}.")
    rows = [(option, written(default), one["says"][option]) for option, default in one["options"].items()]
    preset = name in PRESETS
    title = f"options of {one['name']}" + f", as {name} sets them" * preset
    output.show(output.table(title, ("option", "value" if preset else "default", "what it does"), rows, left=3))
    if one["example"]:
        output.show(f"Example: --recipe {one['example']}")


def describe_one(name: str) -> dict[str, Any]:
    """Return one method or token policy, with a sentence about each option. A preset gives its method with its options.

    Raises:
        UserError: it is unknown.
    """
    from tersekv.codecs import methods, registered
    from tersekv.errors import UserError, hint
    from tersekv.policies import policies
    from tersekv.recipe import PRESETS, Recipe

    asked = PRESETS.get(name, name).partition(":")[0]
    known = {**methods(), **policies()}
    if asked not in known:
        near = hint(asked, [*known, *PRESETS]) or "."
        raise UserError(f"unknown method or token policy '{name}'{near} Known are {', '.join([*known, *PRESETS])}")
    if asked in policies():
        policy = policies()[asked]
        one: dict[str, Any] = {
            "name": asked,
            "options": (Recipe.parse(name).policy() if name in PRESETS else policy()).options(),
            "example": PRESETS.get(name) or policy.recommended or f"{asked}+default",
        }
        says = sentences(policy)
    else:
        (one,) = describe([name])
        method = methods()[asked]
        says = EVERY_METHOD | sentences(type(method.build().keys)) | sentences(method.build)
        one["options"] |= {option: False for option in EVERY_METHOD if option not in one["options"]}
        one["example"] = PRESETS.get(name)
    folder = "policies" if asked in policies() else "codecs"
    text = "" if asked in registered else sys.modules[f"tersekv.{folder}.{asked}"].__doc__ or ""
    return one | {"does": _first(text), "good_for": _of(text, "Good"), "bad_for": _of(text, "Bad"), "says": says}


def _first(text: str) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join(text.partition("\n\n")[0].split())


def _of(text: str, word: str) -> str:
    """Return the text after "Good for:" or "Bad for:", which ends at the next such line or at the paragraph's end."""
    found = re.search(rf"^{word} for: (.*(?:\n(?!(?:Good|Bad) for: ).+)*)", text, re.MULTILINE)
    return " ".join(found[1].split()) if found else "unknown."


def describe(names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return one row per method or preset, with its options. names: of all methods by default."""
    from tersekv.codecs import methods
    from tersekv.recipe import Recipe

    rows = []
    for name in methods() if names is None else names:
        term = Recipe.parse(name).coder.keys
        method, options = methods()[term.name], dict(term.options)
        pair = method.build(**options)
        fits = sorted({str(codec.fits_on) for codec in (pair.keys, pair.values) if codec.fits_on})
        rows.append(
            {
                "name": term.name,
                "title": method.title,
                "paper": method.paper,
                "fits_on": ", ".join(fits) or None,
                "kernels": kernels_of(pair),
                "options": {option: parameter.default for option, parameter in method.parameters.items()} | options,
                "bits": {str(d): _both_sides(name, layers, d) for d, layers in LAYERS.items()},
            }
        )
    return rows


def describe_policies() -> list[dict[str, Any]]:
    """Return one row per token policy, with its default options."""
    from tersekv.policies import policies

    return [
        {
            "name": name,
            "does": _first(sys.modules[f"tersekv.policies.{name}"].__doc__ or ""),
            "drops_tokens": policy.drops,
            "options": policy().options(),
        }
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


def _bits(sides: dict[str, float], head_dim: int) -> Cell:
    numbers = {f"bits, head dim {head_dim}, {side}": bits for side, bits in sides.items()}
    return Cell(f"{sides['keys']:.2f} / {sides['values']:.2f} / {sides['mean']:.2f}", numbers)


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
