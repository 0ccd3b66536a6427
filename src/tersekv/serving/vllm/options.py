"""Options of the vLLM plug-in: the recipe from vLLM's configuration or the environment, and its
checks."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, cast, get_args

from tersekv.errors import UserError
from tersekv.layouts.base import BLOCK_TOKENS
from tersekv.recipe import DEFAULT_POLICY, Recipe, Term
from tersekv.serving.pages import Exactness

VARIABLES = {
    "recipe": "TERSEKV_VLLM_RECIPE",
    "calibration": "TERSEKV_VLLM_CALIBRATION",
    "exact": "TERSEKV_VLLM_EXACT",
}
"""Environment variables of the options of the section."""
SECTION = "tersekv"
EXAMPLE = '{"tersekv": {"recipe": "kivi:bits=4"}}'


class Choice(NamedTuple):
    """A user's settings.

    calibration: file or folder of a calibration, or None. exact: tokens that a prompt's query reads
    exactly, see `serving.pages`.
    """

    recipe: Recipe
    calibration: str | None = None
    exact: Exactness = "step"


def configured(vllm_config: Any) -> Choice | None:
    """Return the settings of an engine; None for vLLM's own cache.

    Raises:
        UserError: the recipe or its section in the configuration is not valid.
    """
    extra = getattr(vllm_config, "additional_config", None)
    section = extra.get(SECTION) if isinstance(extra, dict) else None
    if section is None:
        section = _of_environment()
        if section is None:
            return None
    valid = isinstance(section, dict) and all(isinstance(value, str) for value in section.values())
    if not valid or "recipe" not in section or set(section) - set(VARIABLES):
        raise UserError(
            f"additional_config has {SECTION}: {section!r}, which is not of the form {EXAMPLE}; the options are "
            f"{', '.join(VARIABLES)}, and each is a text"
        )
    exact = section.get("exact", "step")
    if exact not in get_args(Exactness):
        raise UserError(f"exact is {exact!r} and must be one of {', '.join(get_args(Exactness))}")
    return Choice(checked(section["recipe"]), section.get("calibration"), cast(Exactness, exact))


def _of_environment() -> dict[str, str] | None:
    """Return the section that environment variables give; None without a recipe."""
    given = {name: os.environ.get(variable) for name, variable in VARIABLES.items()}
    return {name: value for name, value in given.items() if value} if given["recipe"] else None


def note(vllm_config: Any) -> None:
    """Copy settings from the environment into the configuration. vLLM looks up compiled graphs by
    the configuration, and graphs with packed pages differ from those without."""
    section = _of_environment()
    if section and SECTION not in vllm_config.additional_config:
        vllm_config.additional_config[SECTION] = section


def checked(text: str) -> Recipe:
    """Parse a recipe for pages of an engine.

    Raises:
        UserError: the recipe is not valid, or has a token policy.
    """
    recipe = Recipe.parse(text)
    if recipe.tokens != Term(DEFAULT_POLICY):
        raise UserError(
            f"recipe '{text}' has the token policy '{recipe.tokens}': vLLM's pages hold every token in a block of one "
            "size, and the page that is being filled is read exactly, so leave the policy out"
        )
    return recipe


MOST_GUESSED = BLOCK_TOKENS - 2
"""Tokens guessed in a step, at most. With more a step may fill a page that it began and then take tokens back."""


def why_not_engine(vllm_config: Any) -> str | None:
    """Return the reason why an engine with this configuration does not support packed pages; None
    if it does."""
    model, parallel, guess = vllm_config.model_config, vllm_config.parallel_config, vllm_config.speculative_config
    asked = {
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "text read in both directions": model.is_mm_prefix_lm or vllm_config.attention_config.use_non_causal,
        "reference sliding windows": model.rswa_window is not None,
        "context parallelism": parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1,
        "drafts with a cache of their own": getattr(guess, "uses_draft_kv_cache", lambda: False)(),
        "adaptive verification": guess is not None and guess.enable_adaptive_verification,
        f"more than {MOST_GUESSED} guessed tokens": guess is not None and guess.num_speculative_tokens > MOST_GUESSED,
    }
    found = [name for name, value in asked.items() if value]
    return f"the engine has {', '.join(found)}, which packed pages do not support yet" if found else None


def why_not_layer(
    head_dim: int, options: dict[str, Any], cache_dtype: str, attn_type: str, sharing: str | None, page_tokens: int
) -> str | None:
    """Return the reason why a layer does not support packed pages of `page_tokens` tokens; None if
    it does.

    options: other options of the layer's attention, by name; None or False if not used.
    """
    if attn_type != "decoder":
        return f"its attention is of the type {attn_type!r}; only decoders' own attention reads packed pages"
    if cache_dtype not in ("auto", "float16", "bfloat16"):
        return f"kv_cache_dtype is {cache_dtype!r}, which packs the cache in another way; leave it at auto"
    if head_dim % 16:
        return f"its head dim is {head_dim}, not a multiple of 16"
    if page_tokens % BLOCK_TOKENS:
        return (
            f"pages hold {page_tokens} tokens (--block-size), and packed pages a multiple of {BLOCK_TOKENS}: leave "
            "--block-size out or give one such as 64, 128 or 256"
        )
    if sharing is not None:
        return f"it shares the cache of {sharing}, which is not supported yet"
    asked = [name for name, value in options.items() if value is not None and value is not False]
    return f"it asks for {', '.join(asked)}, which packed pages do not support" if asked else None
