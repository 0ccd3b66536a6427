"""`tersekv estimate`: what a cache would take, from the model's config alone; no weights are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tersekv.cli import output
from tersekv.errors import UserError
from tersekv.units import LONGEST, parse_tokens

DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def estimate(
    model: Annotated[
        str, typer.Option("--model", "-m", help=f"{output.MODEL_HELP} Or llama-7b to llama-65b.")
    ] = "smollm2",
    recipe: Annotated[str, typer.Option("--recipe", "-r", help=output.RECIPE_HELP)] = output.DEFAULT_RECIPE,
    context: Annotated[str, typer.Option("--context", "-c", help="Tokens; k is 1024, M is 1024².")] = "4k,32k,128k,1M",
    memory: Annotated[str | None, typer.Option("--memory", help="Like 24GB or 80GiB: says what fits in it.")] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="Sequences.")] = 1,
    tables: Annotated[str | None, typer.Option("--tables", help="kvquant: its Tables 7 and 8, recomputed.")] = None,
    as_json: output.Json = False,
) -> None:
    """Bytes of a cache at given context lengths, and what fits in a given memory; needs the model's config only."""
    lengths = [parse_tokens(part, "--context") for part in context.split(",")]
    limit = None if memory is None else parse_memory(memory)
    if tables not in (None, "kvquant"):
        raise UserError(f"no tables of {tables!r} are known (known: kvquant)")
    with output.step("loading torch and transformers"):
        document = reproduce() if tables else describe(model, recipe, lengths, batch, limit)
    if as_json:
        output.print_json(document)
    elif tables:
        _show_tables(document)
    else:
        _show(document)


def parse_memory(text: str) -> int:
    """Bytes: 24GB is 24·10⁹, 24GiB is 24·2³⁰."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if not found or not 0 < float(found[1]) < 1e15:
        raise UserError(
            f"--memory {text!r} is no amount of memory: write it like 24GB (10⁹ bytes) or 80GiB (2³⁰ bytes)"
        )
    unit = found[2].lower()
    factor = 1024 ** "kmgt".index(unit) * 1024 if found[3] and unit else DECIMAL[unit]
    return int(float(found[1]) * factor)


def most_tokens(size: Callable[[int], int], limit: int) -> int:
    """The largest number of tokens whose `size` is within `limit`, for a size that grows with tokens."""
    if size(1) > limit:
        return 0
    low, high = 1, 2
    while high < LONGEST and size(high) <= limit:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return low


def describe(model: str, recipe: str, lengths: list[int], batch: int, limit: int | None) -> dict[str, Any]:
    """Rows per context length, and with a limit the most tokens that fit into it."""
    from tersekv.recipe import Recipe
    from tersekv.store import estimate as predicting

    parsed = Recipe.parse(recipe)
    shape, weights = load_shape(model, with_weights=limit is not None)

    def held(tokens: int) -> Any:
        return predicting.predict(shape, parsed, tokens, batch)

    rows = []
    for tokens in lengths:
        footprint = held(tokens)
        rows.append(
            {
                "tokens": tokens,
                "bytes": footprint.total_bytes,
                "bytes_by_part": dict(footprint.parts),
                "bytes_bf16": footprint.elements * 2,
                "bits_per_element": round(footprint.bits_per_element, 4),
                "ratio_bf16": round(footprint.ratio(16), 4),
                "ratio_fp8": round(footprint.ratio(8), 4),
            }
        )
    document = {"model": model, "recipe": str(parsed), "batch": batch, "contexts": rows}
    if limit is not None:
        sizes: dict[str, Callable[[int], int]] = {
            "bf16": lambda n: held(n).elements * 2,
            "fp8": lambda n: held(n).elements,
            str(parsed): lambda n: held(n).total_bytes,
        }
        room = limit - weights
        document |= {
            "memory_bytes": limit,
            "weight_bytes_bf16": weights,
            "most_tokens": {name: most_tokens(size, limit) for name, size in sizes.items()},
            "most_tokens_beside_weights": {name: most_tokens(size, room) for name, size in sizes.items()},
        }
    return document


def load_shape(model: str, with_weights: bool) -> tuple[Any, int]:
    """The shape of a model's cache and the bytes of its weights in bfloat16, both without reading weights."""
    from tersekv.hf import models
    from tersekv.store import estimate as predicting
    from tersekv.store import kvquant_tables as kvquant

    for name, shape in predicting.KNOWN.items():
        if name.lower() == model.lower():
            return shape, int(kvquant.model_gigabytes(name, 16) * kvquant.GIB)
    from tersekv.hf.config import cache_shape

    config = models.load_config(model)
    return cache_shape(config), weight_bytes(config) if with_weights else 0


def weight_bytes(config: Any) -> int:
    """Bytes of the weights in bfloat16, counted without making them."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(config)
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise UserError(
            f"the weights of a {config.model_type} model cannot be counted from its config ({str(error)[:120]}); "
            "leave --memory away, or give a decoder language model"
        ) from error
    return 2 * sum(p.numel() for p in network.parameters())


def reproduce() -> dict[str, Any]:
    """KVQuant's Tables 7 and 8, by the paper's own counting."""
    from tersekv.store import kvquant_tables as kvquant

    titles = {
        "Table 7: weights and cache": kvquant.table_7(),
        "Table 8: cache by format": kvquant.table_8(),
    }
    return {
        "tables": [
            {
                "title": f"KVQuant (arXiv 2401.18079), {title}, GB of 2³⁰ bytes",
                "columns": ["model", "what", *rows[0].gigabytes],
                "rows": [[row.model, row.label, *(round(size, 4) for size in row.gigabytes.values())] for row in rows],
            }
            for title, rows in titles.items()
        ]
    }


def _show(document: dict[str, Any]) -> None:
    columns = ("context", "bytes", "bfloat16 would be", "bits/element", "× bf16", "× fp8", "codes", "other parts")
    cells = []
    for row in document["contexts"]:
        parts = row["bytes_by_part"]
        others = ", ".join(f"{k} {output.human_bytes(v)}" for k, v in parts.items() if v and k != "codes")
        cells.append(
            (
                f"{row['tokens']:,}",
                output.human_bytes(row["bytes"]),
                output.human_bytes(row["bytes_bf16"]),
                f"{row['bits_per_element']:.2f}",
                f"{row['ratio_bf16']:.2f}",
                f"{row['ratio_fp8']:.2f}",
                output.human_bytes(parts.get("codes", 0)),
                others,
            )
        )
    sequences = "" if document["batch"] == 1 else f", batch {document['batch']}"
    output.show(output.table(f"{document['model']}, {document['recipe']}{sequences}", columns, cells))
    if "most_tokens" in document:
        weights = output.human_bytes(document["weight_bytes_bf16"])
        headings = ("cache", "tokens", f"tokens beside bf16 weights ({weights})")
        beside = document["most_tokens_beside_weights"]
        rows = [(name, f"{n:,}", f"{beside[name]:,}") for name, n in document["most_tokens"].items()]
        title = f"most tokens in {output.human_bytes(document['memory_bytes'])}{sequences}"
        output.show(output.table(title, headings, rows))


def _show_tables(document: dict[str, Any]) -> None:
    for made in document["tables"]:
        rows = [[*row[:2], *(f"{size:,.1f}" for size in row[2:])] for row in made["rows"]]
        output.show(output.table(made["title"], made["columns"], rows, left=2))
