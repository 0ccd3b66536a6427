"""The parts of a recipe that need calibration, for a model."""

from __future__ import annotations

from transformers.configuration_utils import PreTrainedConfig

from tersekv.codecs import methods
from tersekv.models.config import AttentionShape, attention_layers, cache_shape, text_config
from tersekv.recipe import PRE_ROPE, Coder, LayerPlan, Recipe, Term
from tersekv.sizes.memory_budget import settled


def calibrated_part(recipe: Recipe) -> str:
    """Return the part of a recipe that a calibration is bound to: all options but those of the rate
    written out, no token policy."""
    return written(recipe, in_full=True)


def profile_of(recipe: Recipe) -> str | None:
    """Return the name of the measurement that the token policy needs, or None."""
    return recipe.policy().profile


def attention_plans(recipe: Recipe, config: PreTrainedConfig) -> dict[int, LayerPlan]:
    """Return the plans of all layers with keys and values, by layer index.

    A policy's `memory` becomes a number of tokens.
    """
    kinds = attention_layers(text_config(config))
    if any(name == "memory" for name, _ in recipe.tokens.options):
        recipe = settled(recipe, cache_shape(config))
    plans = {i: recipe.plan(i, len(kinds)) for i, kind in enumerate(kinds) if kind.type == "attention"}
    if not AttentionShape.of(text_config(config)).latent:
        return plans
    return {i: plan.of_latents(kinds[i].index_dim) for i, plan in plans.items()}


def needs_corpus(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """True if a codec of some layer still needs calibration on a corpus. Latents have none, see `why_not`."""
    plans = [plan for plan in attention_plans(recipe, config).values() if not plan.latent]
    return any(codec.needs_fit == "corpus" for plan in plans for codec in (plan.keys, plan.values))


def needs_profile(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """True if the token policy needs a measurement of the model."""
    kinds = attention_layers(text_config(config))
    full = any(kind.type == "attention" and kind.window is None for kind in kinds)
    return full and profile_of(recipe) is not None


def calibrates_itself(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """True if all that the recipe lacks can be fitted and measured on the model's own text."""
    if recipe.policy().needs_scores:
        return False
    plans = attention_plans(recipe, config).values()
    return all(
        codec.takes_moments for plan in plans for codec in (plan.keys, plan.values) if codec.needs_fit == "corpus"
    )


def how_to(recipe: Recipe) -> str:
    """Return the end of an error message that says how to get a calibration."""
    other = None if profile_of(recipe) else recipe.learning_from_prompt()
    prompt = f", or use '{other}', which is fitted on the prompt" if other else ""
    make = f"make one with `tersekv calibrate --model MODEL --recipe '{recipe}'`, which later runs find"
    return f"{make} (or give calibration=FILE){prompt}"


def written(recipe: Recipe, in_full: bool) -> str:
    def term(one: Term) -> Term:
        method = methods()[one.name]
        keys, parameters = method.build().keys, method.parameters.items()
        defaults = {name: p.default for name, p in parameters if name not in keys.rate_options}
        defaults[PRE_ROPE] = keys.pre_rope
        options = defaults | {name: value for name, value in one.options if name not in keys.rate_options}
        return Term(one.name, tuple(sorted((k, v) for k, v in options.items() if in_full or v != defaults.get(k))))

    def coder(one: Coder) -> Coder:
        keys, values = term(one.keys), one.values and term(one.values)
        return Coder(keys, None if values == keys else values)

    return str(Recipe(coder(recipe.coder), layers=tuple((spec, coder(c)) for spec, c in recipe.layers)))
