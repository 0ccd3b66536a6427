"""Facts about a model that are known without reading its weights: shape of its cache, size, key biases."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tersekv.errors import UserError
from tersekv.units import LONGEST

if TYPE_CHECKING:
    from tersekv.recipe import Recipe

# Other imports are in the functions: facts about a published model need no transformers, which take seconds to import.


USUAL_TOKENS = 32768
"""Length at which recipes are judged, or the model's longest context if that is shorter."""


class Known(NamedTuple):
    """Facts about a model that are known without its weights.

    shape: of its cache.
    config: None for published models and those of the KVQuant paper, which are known by name.
    weights: function that returns their bytes in bfloat16.
    key_bias: function that returns if keys have biases, None if that is unknown.
    widths: on which activations depend, None if they are unknown or the model has experts.
    reads: longest context of a published model.
    """

    shape: Any
    config: Any
    weights: Callable[[], int]
    key_bias: Callable[[], bool | None]
    widths: Any = None
    reads: int | None = None

    @property
    def text(self) -> Any:
        """Config of the text decoder, or None."""
        return None if self.config is None else self.config.get_text_config()

    def peak(self, recipe: Recipe, held: int, tokens: int, batch: int = 1, chunk: int = 0) -> int | None:
        """Return the peak memory of reading a prompt in bfloat16, with weights, None if it is unknown.

        held: bytes of the cache after it. chunk: tokens per forward pass, 0 for all at once.
        """
        from tersekv.sizes.estimate import prefill_bytes

        if self.widths is None:
            return None
        if recipe.policy().waits:
            held = max(held, 2 * self.shape.elements(min(chunk or tokens, tokens), batch))
        try:
            return self.weights() + held + prefill_bytes(self.widths, self.shape, tokens, batch, chunk)
        except UserError:
            return None

    @property
    def longest(self) -> int | None:
        """The model's longest context in tokens, None if it is unknown."""
        return getattr(self.text, "max_position_embeddings", self.reads)

    @property
    def usual_tokens(self) -> int:
        """Length at which recipes are judged."""
        return min(USUAL_TOKENS, self.longest or USUAL_TOKENS)


def load_shape(model: str, with_weights: bool) -> tuple[Any, int]:
    """Return the shape of a model's cache and the bytes of its weights in bfloat16, without reading
    weights. The bytes are 0 if not wanted."""
    known = load_known(model)
    return known.shape, known.weights() if with_weights else 0


def load_known(model: str) -> Known:
    """Return what is known of a model by its name, its folder, its config.json or its Hub id."""
    from tersekv.models import loading
    from tersekv.sizes import known_models
    from tersekv.sizes import kvquant_tables as kvquant
    from tersekv.sizes.estimate import KNOWN

    path = loading.expanded(model)
    known = None if path.exists() else known_models.find(model)
    if known is not None:
        biases, reads = (lambda: known.key_biases), known.reads
        return Known(known.shape, None, lambda: 2 * known.parameters, biases, known.widths, reads)
    name = next((name for name in KNOWN if name.lower() == model.lower()), None)
    if name is not None:
        return Known(KNOWN[name], None, lambda: int(kvquant.model_gigabytes(name, 16) * kvquant.GIB), lambda: False)
    named = path.exists() or model in loading.KNOWN or model.lower().endswith(".gguf")
    near = [] if named else known_models.near(model)
    if near and "/" not in model:
        raise UserError(
            f"{model!r} is not a known published model; similar: {', '.join(near)}. Or give a folder, a config.json, "
            "or a Hub id like owner/name"
        )
    try:
        plain = path.is_file() and loading.gguf_of(model) is None
        config = loading.config_of_file(path) if plain else loading.load_config(model)
    except UserError as error:
        if not near:
            raise
        raise UserError(f"{error}; published models with similar names are {', '.join(near)}") from error
    return of_config(config)


def of_config(config: Any) -> Known:
    """Return what is known of a model by its config."""
    from tersekv.models.config import cache_shape, has_key_bias

    counted = functools.cache(lambda: weight_bytes(config))
    return Known(cache_shape(config), config, counted, lambda: has_key_bias(config), widths_of(config))


def widths_of(config: Any) -> Any:
    """Return the `Widths` of a model, None if its config does not tell them or it has experts."""
    from tersekv.sizes.estimate import Widths

    text = config.get_text_config()
    found: list[Any] = [getattr(text, name, None) for name in ("hidden_size", "intermediate_size", "vocab_size")]
    experts = any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    return Widths(*found) if all(isinstance(x, int) for x in found) and not experts else None


def weight_bytes(config: Any) -> int:
    """Return the bytes of the weights in bfloat16, counted on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise UserError(
            f"the weights of a {config.model_type} model cannot be counted from its config ({str(error)[:120]}); "
            "leave --memory out, or give a decoder language model"
        ) from error
    return 2 * sum(p.numel() for p in network.parameters())


def refusals(recipe: Any, config: Any) -> list[str]:
    """Return all reasons why the recipe cannot be used with the model. config: None if it is not known."""
    from tersekv.hf.why_not import why_not

    return [] if config is None else why_not(recipe, config)


def bias_fault(recipe: Any, shape: Any) -> str | None:
    """Return why a recipe does not fit a model with key biases, and what does; None if it fits.

    It is measured on made keys (`calibration/key_error.py`).
    """
    from tersekv.calibration.key_error import error_with_biases, remedy

    figures = error_with_biases(recipe, shape)
    if figures is None or not figures.is_large:
        return None
    return (
        f"the model's keys have biases, which {recipe.name} codes with an error of {figures.error:.0f} times the keys' "
        f"spread: answers may be garbage; use {remedy(recipe, shape.ropes[0])}"
    )


def most_tokens(size: Callable[[int], int], limit: int, below: int = LONGEST) -> int:
    """Return the largest number of tokens, less than `below`, whose `size` is at most `limit`.
    `size` must be increasing."""
    if size(1) > limit:
        return 0
    low, high = 1, 2
    while high < below and size(high) <= limit:
        low, high = high, high * 2
    high = min(high, below)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low
