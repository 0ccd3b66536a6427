"""`tersekv doctor`: what fits a model, or what is wrong with the installation."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tersekv.cli import estimate, installation, output, sizes
from tersekv.errors import UserError
from tersekv.hf import facts

RECIPES = ("default", "safe", "kivi:bits=4")
"""Recipes that are examined if none is given: the presets, and one that codes keys by channel."""

MODEL_HELP = f"{estimate.MODEL_HELP} Without a model the installation is checked."
RECIPE_HELP = f"{output.RECIPE_HELP} May be repeated."


def doctor(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=False)] = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help=RECIPE_HELP, show_default=", ".join(RECIPES))
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all versions, CPU features and kernels, for a bug report.")
    ] = False,
    as_json: output.Json = False,
) -> int:
    """Say what fits a model and which recipes are a good choice, from its config alone.

    Without a model, check the installation.

    The exit status is 1 if a recipe is a bad choice or something is broken.
    """
    if model is not None:
        if everything:
            raise UserError("--all is about the installation; leave it out, or the model")
        return _show_model(model, recipe or list(RECIPES), as_json)
    if recipe:
        raise UserError("--recipe needs a model; write for example tersekv doctor MODEL --recipe kivi:bits=4")
    with output.step("looking at torch and the kernels"):
        checks = installation.checks()
        document = installation.describe() if as_json or everything else {}
    if as_json:
        output.print_json({"checks": [check._asdict() for check in checks], **document})
    elif everything:
        installation.show(document)
    else:
        for check in checks:
            output.show(f"{check.what:13} {f'BROKEN: {check.broken}' if check.broken else check.value}")
    return int(any(check.broken for check in checks))


def _show_model(model: str, recipes: list[str], as_json: bool) -> int:
    with output.step("loading torch and transformers"):
        document = describe(model, recipes)
    if as_json:
        output.print_json(document)
    else:
        for what, value in document["properties"].items():
            output.show(f"{what:13} {value}")
        for one in document["recipes"]:
            output.show(f"{one['recipe']}: {'good' if one['good'] else 'BAD'}: {'; '.join(one['reasons'])}.")
    return int(not all(one["good"] for one in document["recipes"]))


def describe(model: str, recipes: list[str]) -> dict[str, Any]:
    """Return the document of --json: properties of a model, and a verdict on each recipe."""
    from tersekv.recipe import Recipe

    parsed = [Recipe.parse(recipe) for recipe in recipes]
    known = facts.load_known(model)
    biases = known.key_bias()
    return {
        "model": model,
        "properties": properties(known, biases),
        "context_tokens": known.longest,
        "weight_bytes_bf16": _weights(known),
        "recipes": [verdict(recipe, known, biases, known.usual_tokens) for recipe in parsed],
    }


def properties(known: facts.Known, biases: bool | None) -> dict[str, str]:
    """Return what matters of a model, in words, by name."""
    shape, config = known.shape, known.text
    windows = [window for window in shape.windows if window is not None]
    spans = f", {len(windows)} with a sliding window of {max(windows):,} tokens" if windows else ""
    keys = f"{shape.kv_heads} KV head{'s' * (shape.kv_heads != 1)}"
    said = {
        "layers": f"{len(shape.windows)} with a cache{spans}",
        "heads": f"{shape.query_heads or 'unknown number of'} query heads, {keys}",
        "head dim": f"{shape.key_dim} (keys), {shape.value_dim} (values)",
        "RoPE": rope_of(known),
        "key biases": {True: "yes: keys have a mean that not every method can code", False: "no", None: "unknown"}[
            biases
        ],
    }
    if getattr(config, "kv_lora_rank", None):
        said["latents"] = "keys and values come from latents, which attention reads as they are cached"
    said["context"] = "unknown" if known.longest is None else f"{known.longest:,} tokens"
    try:
        said["weights"] = f"{output.human_bytes(known.weights())} in bfloat16"
    except UserError as error:
        said["weights"] = f"unknown: {error}"
    return said


def _weights(known: facts.Known) -> int | None:
    try:
        return known.weights()
    except UserError:
        return None


def rope_of(known: facts.Known) -> str:
    """Return the type of a model's RoPE, and if it can be removed from keys."""
    from tersekv.transforms.rope import NO_ROPE

    ropes = set(known.shape.ropes)
    if ropes == {NO_ROPE}:
        return "none"
    parameters = getattr(known.text, "rope_parameters", None) or {}
    each = parameters.values() if all(isinstance(one, dict) for one in parameters.values()) else [parameters]
    kinds = ", ".join(dict.fromkeys(one.get("rope_type", "default") for one in each)) or "default"
    if not ropes or None in ropes:
        return f"{kinds}; it cannot be removed from keys, so pre_rope and centre are refused"
    return f"{kinds}{' (changes with the length)' * any(rope.varies for rope in ropes)}"


def verdict(recipe: Any, known: facts.Known, biases: bool | None, tokens: int) -> dict[str, Any]:
    """Return if a recipe is a good choice for a model, with the reasons."""
    from tersekv.sizes.estimate import break_even, predict

    try:
        if reasons := facts.refusals(recipe, known.config):
            return {"recipe": recipe.name, "good": False, "reasons": reasons}
        footprint, least = predict(known.shape, recipe, tokens), break_even(known.shape, recipe)
        fault = facts.bias_fault(recipe, known.shape) if biases else None
    except UserError as error:
        return {"recipe": recipe.name, "good": False, "reasons": [str(error)]}
    held, bfloat16 = footprint.total_bytes, footprint.elements * 2
    size = f"{sizes.against_bfloat16(held, bfloat16)} at {tokens:,} tokens"
    gains = f"gains from some {least:,} tokens on" if least else "never smaller: choose another recipe"
    said = [*([fault] if fault else []), size, gains]
    good = not fault and held < bfloat16
    return {"recipe": recipe.name, "good": good, "reasons": said + [_kernels(recipe, known.shape)] * good}


def _kernels(recipe: Any, shape: Any) -> str:
    """Return the kernel that attends to packed tokens of the middle layer."""
    from tersekv.cli.listing import kernels_of
    from tersekv.codecs.base import Pair

    layers = len(shape.windows)
    plan = (recipe.learning_from_prompt() or recipe).plan(layers // 2, layers)
    if plan.keys.needs_fit == "corpus" or shape.key_dim != shape.value_dim:
        return "kernel unknown"
    return f"kernel {kernels_of(Pair(plan.keys, plan.values), shape.key_dim)}"
