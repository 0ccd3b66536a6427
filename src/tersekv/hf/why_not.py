"""All reasons why a recipe cannot be used with a model in a given way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from transformers import PreTrainedConfig

from tersekv.cache.head_tokens import UNREADABLE
from tersekv.cache.ranked_tokens import UNRANKED
from tersekv.calibration.needs import attention_plans
from tersekv.codecs import methods
from tersekv.errors import UserError
from tersekv.models.config import AttentionShape, attention_layers, text_config
from tersekv.models.rope import Ropes
from tersekv.recipe import CENTRE, PRE_ROPE, Coder, LayerPlan, Recipe, Term

Use = Literal["transformers", "context_parallel"]
"""Ways to use a recipe: in one process or with tensor parallelism, or with context parallelism."""

LATENT = (
    "its cache holds one latent per token for all heads, so the policy must keep every token at one rate "
    "(window, without bias_correction)"
)

SPREAD = "it does not work with context_parallel"


def why_not(recipe: str | Recipe, config: PreTrainedConfig, use: Use = "transformers") -> list[str]:
    """Return why a recipe cannot be used with a model of this config; nothing if it can be.

    Raises:
        UserError: the recipe is not valid, the model has no key-value cache, or `use` is unknown.
    """
    if use not in get_args(Use):
        raise UserError(f"use={use!r} is not allowed; choose one of {', '.join(get_args(Use))}")
    config, recipe = text_config(config), Recipe.parse(recipe)
    return faults(recipe, attention_plans(recipe, config), config, use)


def faults(
    recipe: Recipe, plans: Mapping[int, LayerPlan], config: PreTrainedConfig, use: Use, ropes: Ropes | None = None
) -> list[str]:
    """Return the same for the plans of a model's attention layers. config: of its text decoder."""
    shape = AttentionShape.of(config)
    ropes = ropes or Ropes(config, shape.key_dim)
    windows = {i: kind.window for i, kind in enumerate(attention_layers(config))}
    found = (why for i, plan in plans.items() for why in _of_layer(recipe, plan, i, windows[i], shape, ropes, use))
    return list(dict.fromkeys(found))


def with_rope(recipe: Recipe) -> Recipe:
    """Return the recipe whose keys are coded as they are, with their RoPE and their mean."""

    def term(one: Term) -> Term:
        if not Coder(one).at(0)[0].needs_rope:
            return one
        own = methods()[one.name].parameters
        options = {name: value for name, value in one.options if name in own} | {PRE_ROPE: False}
        return Term(one.name, tuple(sorted((options | ({CENTRE: False} if CENTRE in own else {})).items())))

    return recipe.with_terms(term)


def _of_layer(
    recipe: Recipe, plan: LayerPlan, index: int, window: int | None, shape: AttentionShape, ropes: Ropes, use: Use
) -> Iterator[str]:
    for codec, dim in ((plan.keys, shape.key_dim), (plan.values, shape.value_dim)):
        try:
            codec.layout(dim)
        except UserError as error:
            yield str(error)
    try:
        ropes.needed_by(plan.keys, index)
    except UserError as error:
        yield f"{error}; write {with_rope(recipe)}"
    if shape.latent and "corpus" in (plan.keys.fits_on, plan.values.fits_on):
        yield "a calibration on a corpus is of keys and values, and its cache holds latents; use calibration=prompt"
    policy = plan.policy
    if shape.latent and (policy.drops or policy.observes or policy.corrected_share):
        yield LATENT
    elif (policy.drops or policy.observes) and not shape.passes_handles:
        yield UNREADABLE if policy.drops else UNRANKED
    if use != "context_parallel" or window is not None:
        return
    if policy.drops:
        yield f"{SPREAD}: the policy drops tokens; use one that keeps all (window)"
    elif policy.observes:
        yield f"{SPREAD}: the policy ranks all tokens of a prompt; use one with equal rates (window)"
    if shape.latent:
        yield f"{SPREAD}: the model has latent attention"
    elif not shape.passes_handles:
        yield f"{SPREAD}: the model changes keys and values before attention"
