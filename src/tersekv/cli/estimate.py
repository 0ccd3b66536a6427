"""`tersekv estimate`: predict the size of a cache from the model's config, without reading
weights."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from tersekv.cli import estimate_tables, output
from tersekv.cli.generate import PrefillChunk, chunk_of
from tersekv.errors import UserError
from tersekv.hf.facts import Known, bias_fault, load_known, most_tokens, refusals
from tersekv.units import LONGEST, parse_bytes, parse_tokens

GENERATED = 1000
"""Number of tokens generated one by one in the estimate of slack."""

log = logging.getLogger(__name__)

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
        int | None, typer.Option("--batch", "-b", min=1, max=1 << 20, help="Number of sequences.", show_default="1")
    ] = None,
    prefill_chunk: PrefillChunk = None,
    tables: Annotated[str | None, typer.Option("--tables", help=TABLES_HELP)] = None,
    as_json: output.Json = False,
) -> None:
    """Predict the bytes of a cache at several context lengths, from the model's config alone.

    With --memory, also say if it fits. The exit status is 0 even if it does not fit.

    Scripts can read "fits" in the output of --json.
    """
    if tables is not None:
        others = {
            "--model": model,
            "--recipe": recipe,
            "--context": context,
            "--memory": memory,
            "--prefill-chunk": prefill_chunk,
        }
        document = _tables(tables, [name for name, value in others.items() if value is not None], batch)
        if as_json:
            output.print_json(document)
        else:
            estimate_tables.show_kvquant(document)
        return
    lengths = [] if context is None else [parse_tokens(part, "--context") for part in context.split(",")]
    limit = None if memory is None else parse_bytes(memory, "--memory")
    chunk = chunk_of(prefill_chunk) or 0
    with output.step("computing sizes"):
        name = DEFAULT_MODEL if model is None else model
        document = describe(name, recipe or [output.DEFAULT_RECIPE], lengths, batch or 1, limit, chunk)
    if as_json:
        output.print_json(document)
    else:
        estimate_tables.show(document)


def describe(
    model: str, recipes: Sequence[str], lengths: Sequence[int], batch: int, limit: int | None, chunk: int = 0
) -> dict[str, Any]:
    """Return the document of --json: contexts and break-even length per recipe, and with a limit
    what fits. lengths: those of `DEFAULT_CONTEXT` that the model reads if empty. chunk: prompt tokens
    per forward pass, 0 for all at once.

    Raises:
        UserError: a recipe is given twice or does not support the model.
    """
    from tersekv.recipe import Recipe

    parsed = [Recipe.parse(recipe) for recipe in recipes]
    twice = next((recipe for i, recipe in enumerate(parsed) if recipe in parsed[:i]), None)
    if twice is not None:
        raise UserError(f"--recipe {twice} was given twice: give each recipe once")
    known = load_known(model)
    longest = known.longest
    lengths = lengths or _usual(longest)
    if longest and max(lengths) > longest:
        log.warning(f"--context {max(lengths):,} is beyond the {longest:,} tokens that {model} reads at most")
    weights = known.weights() if limit is not None else 0
    room = None if limit is None else limit - weights
    described: list[dict[str, Any]] = []
    for recipe in parsed:
        try:
            described.append(_describe_one(known, recipe, lengths, batch, chunk, room))
        except UserError as error:
            raise error if len(parsed) == 1 else UserError(f"--recipe {recipe}: {error}") from error
    sizes = _sizes_by_length(known.shape, parsed, batch)
    _compare(described, parsed if len(parsed) > 1 else [Recipe.parse(output.DEFAULT_RECIPE)], sizes, known, batch)
    document: dict[str, Any] = {"model": model, "longest_tokens": longest, "batch": batch, "recipes": described}
    if limit is not None and room is not None:
        document |= {"memory_bytes": limit, "weight_bytes_bf16": weights, **_fitting(described, sizes, limit, room)}
    return document


def _usual(longest: int | None) -> list[int]:
    """Return the lengths for which no --context was given: what the model reads at most is the last one."""
    every = [parse_tokens(part) for part in DEFAULT_CONTEXT.split(",")]
    return every if longest is None else [n for n in every if n < longest] + [min(longest, every[-1])]


def _sizes_by_length(shape: Any, recipes: Sequence[Any], batch: int) -> dict[str, Callable[[int], int]]:
    """Return functions from tokens to bytes: of the plain caches, and of each recipe."""
    from tersekv.sizes.estimate import predict

    sizes: dict[str, Callable[[int], int]] = {
        "bf16": lambda n: shape.elements(n, batch) * 2,
        "fp8": lambda n: shape.elements(n, batch),
    }
    for recipe in recipes:
        sizes[str(recipe)] = functools.cache(lambda n, recipe=recipe: predict(shape, recipe, n, batch).total_bytes)
    return sizes


def _describe_one(
    known: Known, recipe: Any, lengths: Sequence[int], batch: int, chunk: int, room: int | None
) -> dict[str, Any]:
    """Return the part of one recipe.

    Raises:
        UserError: it does not support the model.
    """
    from tersekv.sizes.estimate import break_even, predict

    if reasons := refusals(recipe, known.config):
        raise UserError("; ".join(reasons))
    shape = known.shape
    rows = [{"tokens": n, **_sizes(predict(shape, recipe, n, batch), room)} for n in lengths]
    for row in rows:
        row["peak_bytes"] = known.peak(recipe, row["bytes"], row["tokens"], batch, chunk)
    return {
        "recipe": str(recipe),
        "break_even_tokens": break_even(shape, recipe, batch),
        "contexts": rows,
        "generating": _generating(shape, recipe, max(lengths), batch),
        "layers": predict(shape, recipe, max(lengths), batch).coded,
        "equal_layers": recipe.policy().allots,
        "advice": bias_fault(recipe, shape) if known.key_bias() else None,
    }


def _compare(
    described: list[dict[str, Any]], parsed: Sequence[Any], sizes: dict[str, Any], known: Known, batch: int
) -> None:
    """Add to each recipe from which length on it is smaller than the first of `parsed`, or larger."""
    from tersekv.sizes.estimate import last_change

    first = parsed[0]
    if refusals(first, known.config):
        return
    size = _sizes_by_length(known.shape, [first], batch)[str(first)]
    for one in described:
        if one["recipe"] != str(first):
            tokens, order = last_change(sizes[one["recipe"]], size)
            one["compared"] = {"with": str(first), "tokens": tokens, "order": order}


def _fitting(
    described: list[dict[str, Any]], sizes: dict[str, Callable[[int], int]], limit: int, room: int
) -> dict[str, Any]:
    """Return what fits into `limit` without weights and into `room` beside them."""
    lengths = [row["tokens"] for row in described[0]["contexts"]]
    plain = {name: [{"tokens": n, **_fit(sizes[name](n), room)} for n in lengths] for name in ("bf16", "fp8")}
    beside = {}
    for name, rows in (plain | {one["recipe"]: one["contexts"] for one in described}).items():
        unfit = [row["tokens"] for row in rows if not row["fits"]]
        beside[name] = most_tokens(sizes[name], room, min(unfit, default=LONGEST))
    return {
        "plain": plain,
        "most_tokens": {name: most_tokens(size, limit) for name, size in sizes.items()},
        "most_tokens_beside_weights": beside,
    }


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
                "title": f"KVQuant (arXiv 2401.18079), {title}",
                "columns": [
                    "model",
                    "what",
                    *(f"{context} (GiB)" for context in rows[0].gigabytes),
                    *(("bits", "our bits") if rows[0].bits else ()),
                ],
                "rows": [
                    [row.model, row.label, *(round(size, 4) for size in (*row.gigabytes.values(), *(row.bits or ())))]
                    for row in rows
                ],
            }
            for title, rows in titles.items()
        ]
    }
