"""Tables of `tersekv estimate`: details of one recipe, or one row per recipe."""

from __future__ import annotations

from typing import Any

from tersekv.cli import output, sizes
from tersekv.cli.bare import Cell, size
from tersekv.units import LONGEST


def show(document: dict[str, Any]) -> None:
    """Print sizes, what fits, and what is counted."""
    recipes = document["recipes"]
    (_show_one if len(recipes) == 1 else _show_several)(document)
    for one in recipes:
        for row in one["contexts"]:
            if row["bytes"] >= row["bytes_bf16"]:
                larger = sizes.against_bfloat16(row["bytes"], row["bytes_bf16"])
                output.show(f"{row['tokens']:,} tokens with {sizes.short_name(one['recipe'])}: {larger}.")
    gains = [sizes.gains_from(one["recipe"], one["break_even_tokens"]) for one in recipes]
    output.show(f"Against bfloat16: {'; '.join(gains)}.")
    for one in recipes:
        if against := one.get("compared"):
            output.show(sizes.compared(one["recipe"], against["with"], against["tokens"], against["order"]))
    longest = max(row["tokens"] for row in recipes[0]["contexts"])
    peaks = {one["recipe"]: row["peak_bytes"] for one in recipes for row in one["contexts"] if row["tokens"] == longest}
    if len(recipes) > 1 and None not in peaks.values():
        said = "; ".join(f"{sizes.short_name(name)} {output.human_bytes(size)}" for name, size in peaks.items())
        output.show(f"Peak memory while {longest:,} tokens are read: {said}.")
    last = recipes[0]["generating"]
    held = "; ".join(sizes.while_generating(one["generating"], one["recipe"]) for one in recipes)
    output.show(f"With the last {last['generated']:,} of {last['tokens']:,} tokens generated one by one: {held}.")
    for one in recipes:
        if len(one["layers"]) > 1:
            output.show(sizes.by_layer(one["recipe"], one["layers"]))
        if one["equal_layers"]:
            output.show(sizes.equal_layers(one["recipe"]))
        if one["advice"]:
            name = sizes.short_name(one["recipe"])
            output.show(f"{name} is probably RUINED: {one['advice']}. See `tersekv doctor {document['model']}`.")
    output.show(sizes.COUNTED)


def _title(document: dict[str, Any], recipe: str = "") -> str:
    sequences = "" if document["batch"] == 1 else f", batch {document['batch']}"
    return f"{document['model']}{recipe and f', {recipe}'}{sequences}"


def _show_one(document: dict[str, Any]) -> None:
    columns = ("context", "bytes", "bfloat16 would be", "bits/element", "× bf16", "× fp8", "peak")
    (one,) = document["recipes"]
    cells, others = [], []
    for row in one["contexts"]:
        parts = row["bytes_by_part"]
        others.append(
            f"{row['tokens']:,} tokens: {', '.join(f'{k} {output.human_bytes(v)}' for k, v in parts.items() if v)}."
        )
        cells.append(
            (
                f"{row['tokens']:,}",
                size(row["bytes"], "{}"),
                size(row["bytes_bf16"]),
                f"{row['bits_per_element']:.2f}",
                f"{row['ratio_bf16']:.2f}",
                f"{row['ratio_fp8']:.2f}",
                "unknown" if row["peak_bytes"] is None else size(row["peak_bytes"]),
            )
        )
    output.show(output.table(_title(document, one["recipe"]), columns, cells))
    for line in others:
        output.show(line)
    if "memory_bytes" not in document:
        return
    memory, weights = document["memory_bytes"], document["weight_bytes_bf16"]
    beside = document["most_tokens_beside_weights"]
    headings = ("cache", "tokens", "tokens beside bf16 weights")
    rows = [(name, _count(n), _count(beside[name])) for name, n in document["most_tokens"].items()]
    sequences = "" if document["batch"] == 1 else f", batch {document['batch']}"
    title = f"most tokens in {output.human_bytes(memory)}{sequences}; bf16 weights take {output.human_bytes(weights)}"
    output.show(output.table(title, headings, rows))
    if weights >= memory:
        output.show(f"{sizes.no_room(weights, memory)}.")
        return
    for row in one["contexts"]:
        output.show(f"{sizes.verdict(row, memory - weights, beside[one['recipe']])}.")


def _show_several(document: dict[str, Any]) -> None:
    """Print one row per recipe and one column per context: bytes, ratio to bfloat16, and with
    --memory if it fits."""
    recipes = document["recipes"]
    contexts = recipes[0]["contexts"]
    limited = "memory_bytes" in document
    plain = document["plain"]["bf16"] if limited else [{"bytes": row["bytes_bf16"]} for row in contexts]
    rows = [["bfloat16", *(_cell(row["bytes"], 1.0, row.get("fits")) for row in plain)]]
    for one in recipes:
        cells = [_cell(row["bytes"], row["ratio_bf16"], row.get("fits")) for row in one["contexts"]]
        rows.append([sizes.short_name(one["recipe"]), *cells])
    columns = ["recipe", *(f"{row['tokens']:,}" for row in contexts)]
    if limited:
        columns.append("most tokens")
        most = document["most_tokens_beside_weights"]
        for row, name in zip(rows, ["bf16", *(one["recipe"] for one in recipes)], strict=True):
            row.append(_count(most[name]))
    output.show(output.table(_title(document), columns, rows))
    if not limited:
        return
    memory, weights = document["memory_bytes"], document["weight_bytes_bf16"]
    if weights >= memory:
        output.show(f"{sizes.no_room(weights, memory)}.")
        return
    for one in recipes:
        ordered = sorted(one["contexts"], key=lambda row: row["tokens"])
        edge = [row for row in ordered if row["fits"]][-1:] + [row for row in ordered if not row["fits"]][:1]
        said = "; ".join(sizes.verdict(row, memory - weights, most[one["recipe"]]) for row in edge)
        output.show(f"{sizes.short_name(one['recipe'])}: {said}.")


def _cell(bytes: int, ratio: float, fits: bool | None) -> Cell:
    answer = "" if fits is None else "\nfits" if fits else "\ntoo large"
    numbers = {"{} tokens (bytes)": bytes, "{} tokens (× bf16)": round(ratio, 4)}
    text = f"{output.human_bytes(bytes)}\n{ratio:.2f}×{answer}"
    return Cell(text, numbers if fits is None else numbers | {"{} tokens, fits": "yes" if fits else "no"})


def _count(tokens: int) -> str:
    return "any number" if tokens >= LONGEST - 1 else f"{tokens:,}"


def show_kvquant(document: dict[str, Any]) -> None:
    """Print the tables of `estimate --tables kvquant`."""
    for made in document["tables"]:
        places = [2 if column.endswith("bits") else 1 for column in made["columns"][2:]]
        rows = [[*row[:2], *(f"{x:,.{n}f}" for x, n in zip(row[2:], places, strict=True))] for row in made["rows"]]
        output.show(output.table(made["title"], made["columns"], rows, left=2))
