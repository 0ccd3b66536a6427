"""`tersekv estimate`: predict the size of a cache from the model's config, without reading
weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from tersekv.cli import estimate_tables, output
from tersekv.errors import UserError
from tersekv.units import LONGEST, parse_tokens

GENERATED = 1000
"""Number of tokens generated one by one in the estimate of slack."""

DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
MODEL_HELP = (
    "Model: smollm2, a published model (llama-3.1-8b, qwen3-8b, gemma-3-12b, …; see `tersekv models list`), a folder, "
    "a config.json, a GGUF file, or a Hub id."
)
RECIPE_HELP = f"{output.RECIPE_HELP} May be repeated, for one table of all."
MEMORY_HELP = "Memory for weights and cache, for example 24GB or 80GiB. Shows which contexts fit."
TABLES_HELP = "kvquant: recompute Tables 7 and 8 of the KVQuant paper. Only --batch may be combined with it."
DEFAULT_MODEL, DEFAULT_CONTEXT = "smollm2", "4k,32k,128k,1M"


def estimate(
    model: Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, show_default=DEFAULT_MODEL)] = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help=RECIPE_HELP, show_default=output.DEFAULT_RECIPE)
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context", "-c", help="Context lengths in tokens; k is 1024, M is 1024².", show_default=DEFAULT_CONTEXT
        ),
    ] = None,
    memory: Annotated[str | None, typer.Option("--memory", help=MEMORY_HELP)] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", min=1, help="Number of sequences.", show_default="1")
    ] = None,
    tables: Annotated[str | None, typer.Option("--tables", help=TABLES_HELP)] = None,
    as_json: output.Json = False,
) -> None:
    """Predict the bytes of a cache at several context lengths, from the model's config alone.

    With --memory, also say if it fits. The exit status is 0 even if it does not fit.

    Scripts can read "fits" in the output of --json.
    """
    if tables is not None:
        others = {"--model": model, "--recipe": recipe, "--context": context, "--memory": memory}
        document = _tables(tables, [name for name, value in others.items() if value is not None], batch)
        if as_json:
            output.print_json(document)
        else:
            estimate_tables.show_kvquant(document)
        return
    lengths = [parse_tokens(part, "--context") for part in (DEFAULT_CONTEXT if context is None else context).split(",")]
    limit = None if memory is None else parse_memory(memory)
    with output.step("loading torch and transformers"):
        name = DEFAULT_MODEL if model is None else model
        document = describe(name, recipe or [output.DEFAULT_RECIPE], lengths, batch or 1, limit)
    if as_json:
        output.print_json(document)
    else:
        estimate_tables.show(document)


def parse_memory(text: str) -> int:
    """Parse an amount of memory into bytes: 24GB is 24·10⁹, 24GiB is 24·2³⁰. Without a unit it is
    bytes.

    Raises:
        UserError: the text is not an amount, or is below 10⁶ without a unit, which is probably
            missing.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if not found or not 0 < float(found[1]) < 1e15 or (text.strip()[-1].isdigit() and float(found[1]) < 1e6):
        raise UserError(
            f"--memory {text!r} is not a valid amount of memory: write it like 24GB (10⁹ bytes) or 80GiB (2³⁰ bytes)"
        )
    unit = found[2].lower()
    factor = 1024 ** "kmgt".index(unit) * 1024 if found[3] and unit else DECIMAL[unit]
    return int(float(found[1]) * factor)


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


def describe(
    model: str, recipes: Sequence[str], lengths: Sequence[int], batch: int, limit: int | None
) -> dict[str, Any]:
    """Return the document of --json: contexts and break-even length per recipe, and with a limit
    what fits.

    Raises:
        UserError: a recipe is given twice or does not support the model.
    """
    from tersekv.recipe import Recipe
    from tersekv.sizes.estimate import break_even, predict

    parsed = [Recipe.parse(recipe) for recipe in recipes]
    twice = next((recipe for i, recipe in enumerate(parsed) if recipe in parsed[:i]), None)
    if twice is not None:
        raise UserError(f"--recipe {twice} was given twice: give each recipe once")
    known = load_known(model)
    shape, weights = known.shape, known.weights() if limit is not None else 0
    biases = bool(known.key_bias())
    room = None if limit is None else limit - weights
    sizes: dict[str, Callable[[int], int]] = {
        "bf16": lambda n: shape.elements(n, batch) * 2,
        "fp8": lambda n: shape.elements(n, batch),
    }
    described: list[dict[str, Any]] = []
    for recipe in parsed:
        try:
            if reasons := refusals(recipe, known.config):
                raise UserError("; ".join(reasons))
            rows = [{"tokens": n, **_sizes(predict(shape, recipe, n, batch), room)} for n in lengths]
            least = break_even(shape, recipe, batch)
        except UserError as error:
            raise error if len(parsed) == 1 else UserError(f"--recipe {recipe}: {error}") from error
        sizes[str(recipe)] = lambda n, recipe=recipe: predict(shape, recipe, n, batch).total_bytes  # type: ignore[misc]
        described.append(
            {
                "recipe": str(recipe),
                "break_even_tokens": least,
                "contexts": rows,
                "generating": _generating(shape, recipe, max(lengths), batch),
                "layers": predict(shape, recipe, max(lengths), batch).coded,
                "equal_heads": recipe.policy().needs_scores,
                "equal_layers": recipe.policy().allots,
                "advice": bias_fault(recipe, shape) if biases else None,
            }
        )
    document: dict[str, Any] = {"model": model, "batch": batch, "recipes": described}
    if limit is not None and room is not None:
        rows_of = {one["recipe"]: one["contexts"] for one in described}
        plain = {name: [_fit(sizes[name](n), room) for n in lengths] for name in ("bf16", "fp8")}
        beside = {}
        for name, size in sizes.items():
            fits = [row["fits"] for row in rows_of.get(name, plain.get(name, []))]
            unfit = [n for n, fit in zip(lengths, fits, strict=True) if not fit]
            beside[name] = most_tokens(size, room, min(unfit, default=LONGEST))
        document |= {
            "memory_bytes": limit,
            "weight_bytes_bf16": weights,
            "plain": {
                name: [{"tokens": n, **row} for n, row in zip(lengths, rows, strict=True)]
                for name, rows in plain.items()
            },
            "most_tokens": {name: most_tokens(size, limit) for name, size in sizes.items()},
            "most_tokens_beside_weights": beside,
        }
    return document


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


def _sizes(footprint: Any, room: int | None) -> dict[str, Any]:
    """Return the sizes of one context of a recipe, without its length."""
    row = {
        "bytes": footprint.total_bytes,
        "bytes_by_part": dict(footprint.parts),
        "bytes_bf16": footprint.elements * 2,
        "bits_per_element": round(footprint.bits_per_element, 4),
        "ratio_bf16": round(footprint.ratio(16), 4),
        "ratio_fp8": round(footprint.ratio(8), 4),
    }
    return row if room is None else row | _fit(footprint.total_bytes, room)


def _generating(shape: Any, recipe: Any, tokens: int, batch: int) -> dict[str, Any]:
    """Return the size of the longest context if its last tokens are generated one by one. Pages
    then have room for further tokens ("slack_bytes").

    "chooses" is true if the policy evicts tokens: attention then decides which blocks keep empty
    slots.
    """
    from tersekv.sizes.estimate import predict

    generated = min(GENERATED, tokens // 2)
    held = predict(shape, recipe, tokens, batch, generated=generated)
    slack = held.parts["slack"]
    figures = {"tokens": tokens, "generated": generated, "bytes": held.total_bytes, "slack_bytes": slack}
    return figures | {"chooses": recipe.policy().drops}


def _fit(size: int, room: int) -> dict[str, Any]:
    """Return whether a cache fits into `room`, the memory next to the weights, and the bytes left,
    negative if it does not fit."""
    return {"bytes": size, "fits": size <= room, "left_bytes": room - size}


class Known(NamedTuple):
    """Facts about a model that are known without its weights.

    shape: of its cache.
    config: None for published models and those of the KVQuant paper, which are known by name.
    weights: function that returns their bytes in bfloat16.
    key_bias: function that returns if keys have biases, None if that is unknown.
    """

    shape: Any
    config: Any
    weights: Callable[[], int]
    key_bias: Callable[[], bool | None]


def load_shape(model: str, with_weights: bool) -> tuple[Any, int]:
    """Return the shape of a model's cache and the bytes of its weights in bfloat16, without reading
    weights. The bytes are 0 if not wanted."""
    known = load_known(model)
    return known.shape, known.weights() if with_weights else 0


def load_known(model: str) -> Known:
    """Return what is known of a model by its name, its folder, its config.json or its Hub id."""
    from tersekv.models import loading
    from tersekv.models.config import cache_shape, has_key_bias
    from tersekv.sizes import known_models
    from tersekv.sizes import kvquant_tables as kvquant
    from tersekv.sizes.estimate import KNOWN

    path = loading.expanded(model)
    known = None if path.exists() else known_models.find(model)
    if known is not None:
        return Known(known.shape, None, lambda: 2 * known.parameters, lambda: known.key_biases)
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
    return Known(cache_shape(config), config, lambda: weight_bytes(config), lambda: has_key_bias(config))


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


def _tables(name: str, others: Sequence[str], batch: int | None) -> dict[str, Any]:
    """Return the tables of a paper. others: given options that cannot be combined with --tables.

    Raises:
        UserError: the paper is unknown, or `others` is not empty.
    """
    if name != "kvquant":
        raise UserError(f"{name!r} is not a valid value of --tables (known: kvquant)")
    if others:
        raise UserError(f"--tables {name} has its own models, formats and contexts: leave {', '.join(others)} out")
    with output.step("loading torch"):
        return reproduce(batch)


def reproduce(batch: int | None = None) -> dict[str, Any]:
    """Compute KVQuant's Tables 7 and 8 by the paper's own counting, with the paper's batches (4 and
    1, and 1) or with `batch`."""
    from tersekv.sizes import kvquant_tables as kvquant

    titles = {
        "Table 7: weights and cache": kvquant.table_7() if batch is None else kvquant.table_7((batch,)),
        f"Table 8: cache by format, batch {batch or 1}": kvquant.table_8(batch or 1),
    }
    return {
        "tables": [
            {
                "title": f"KVQuant (arXiv 2401.18079), {title}, GB of 2³⁰ bytes",
                "columns": ["model", "what", *rows[0].gigabytes, *(("bits", "our bits") if rows[0].bits else ())],
                "rows": [
                    [row.model, row.label, *(round(size, 4) for size in (*row.gigabytes.values(), *(row.bits or ())))]
                    for row in rows
                ],
            }
            for title, rows in titles.items()
        ]
    }
