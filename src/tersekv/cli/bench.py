"""`tersekv bench attend`: attention over packed bytes against dense attention, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tersekv.cli import output
from tersekv.cli.env import cpu_features
from tersekv.units import parse_lengths, parse_numbers

if TYPE_CHECKING:
    from tersekv.bench.attend import Measured

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure speed on this machine."""


@app.command()
def attend(
    tokens: Annotated[str, typer.Option("--tokens", help="Context lengths, like 1k,32k.")] = "32k",
    heads: Annotated[str, typer.Option("--heads", help="Query heads/KV heads/head dim, several with commas.")] = (
        "32/8/128"
    ),
    formats: Annotated[str, typer.Option("--formats", help="Packed formats, separated by commas.")] = (
        "grid4,grid3,grid2"
    ),
    threads: Annotated[str, typer.Option("--threads", help="Numbers of threads, like 1,2.")] = "1",
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="Time for one context.")] = 6.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Append JSON lines, one per way.")] = None,
    as_json: output.Json = False,
) -> None:
    """One token's attention over packed keys and values, beside SDPA, batched matmul and the memory's bandwidth."""
    from tersekv.bench.attend import Heads, measure
    from tersekv.bench.formats import chosen

    shapes = [Heads.parse(part) for part in heads.split(",")]
    names = chosen(formats)
    lengths, counts = parse_lengths(tokens, "--tokens"), parse_numbers(threads, "--threads", 1, 256)
    results: list[dict[str, Any]] = []
    for shape in shapes:
        for length in lengths:
            for count in counts:
                with output.step(f"{shape}, {length} tokens, {count} threads"):
                    measured = measure(shape, length, names, count, seconds)
                results += measured.results()
                if out is not None:
                    _append(out, measured)
                if not as_json:
                    output.show(_table(measured))
    if as_json:
        output.print_json({"results": results})


def _machine() -> dict[str, Any]:
    import torch

    from tersekv.ops import cpu

    return {"bench": "attend", "isa": cpu.isa(), "cpu": cpu_features()[0], "torch": torch.__version__}


def _append(path: Path, measured: Measured) -> None:
    common = _machine() | {"read_gb_per_s": round(measured.bandwidth, 2)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(common | row.record()) + "\n" for row in measured.rows)


def _table(measured: Measured) -> Any:
    first = measured.rows[0]
    title = (
        f"{first.heads} (query heads / KV heads / head dim), {first.tokens:,} tokens, {first.threads} threads; "
        f"memory reads {measured.bandwidth:.1f} GB/s"
    )
    columns = ("way", "bits", "ms", "p10–p90", "GB/s", "× sdpa", "× matmul", "× floor", "error")
    results = {result["format"]: result for result in measured.results()}
    rows = []
    for row in measured.rows:
        result = results.get(row.what, {})
        ratios = [f"{result[key]:.2f}" if result else "" for key in ("speedup_sdpa", "speedup_dense", "speedup_floor")]
        rows.append((
            row.what, row.bits or (16 if "bfloat16" in row.what else 32), f"{row.time.ms:.2f}",
            f"{row.time.p10:.2f}–{row.time.p90:.2f}", f"{row.bytes / row.time.ms / 1e6:.1f}", *ratios,
            f"{row.error:.1e}" if result else "",
        ))  # fmt: skip
    return output.table(title, columns, rows)
