"""`tersekv bench`: attention over packed bytes against dense attention, and decoding with a model, on this machine."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tersekv.cli import output
from tersekv.cli.env import cpu_features
from tersekv.cli.generate import load
from tersekv.errors import UserError
from tersekv.units import parse_lengths, parse_numbers

if TYPE_CHECKING:
    from tersekv.lab.bench.attend import Heads, Measured
    from tersekv.lab.bench.attend_gpu import Measured as MeasuredGpu
    from tersekv.lab.bench.generate import Decoding

CACHES_HELP = "A recipe, or one of transformers' own: quanto-4, quanto-2, hqq-4, hqq-2, fp8. May be repeated."

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
    formats: Annotated[str, typer.Option("--formats", help="Packed formats, separated by commas, or all.")] = (
        "grid4,grid3,grid2"
    ),
    threads: Annotated[str, typer.Option("--threads", help="Numbers of threads, like 1,2.")] = "1",
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="Time for one context.")] = 6.0,
    device: Annotated[str, typer.Option("--device", help="cpu, or cuda.")] = "cpu",
    batch: Annotated[str, typer.Option("--batch", help="Rows of a batch on a GPU, like 1,8.")] = "1",
    limit: Annotated[float, typer.Option("--limit", min=0.0, help="Minutes; later no format begins on a GPU.")] = 8.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Append JSON lines, one per way.")] = None,
    as_json: output.Json = False,
) -> None:
    """One token's attention over packed keys and values, beside dense ways and the memory's bandwidth."""
    from tersekv.lab.bench.attend import Heads, measure
    from tersekv.lab.bench.formats import chosen

    shapes = [Heads.parse(part) for part in heads.split(",")]
    names = chosen(formats)
    if device != "cpu":
        sizes = parse_lengths(tokens, "--tokens"), parse_numbers(batch, "--batch", 1, 4096)
        _attend_gpu(device, shapes, *sizes, names, seconds, limit, out, as_json)
        return
    lengths, counts = parse_lengths(tokens, "--tokens"), parse_numbers(threads, "--threads", 1, 256)
    results: list[dict[str, Any]] = []
    contexts = list(itertools.product(shapes, lengths, counts))
    for done, (shape, length, count) in enumerate(contexts, 1):
        which = f"context {done} of {len(contexts)}: {shape}, {length:,} tokens, threads: {count}"
        with output.step(f"timing {which}, about {seconds:g} s"):
            measured = measure(shape, length, names, count, seconds)
        results += measured.results()
        if out is not None:
            _append(out, measured)
        if not as_json:
            output.show(_table(measured))
    if as_json:
        output.print_json({"results": results})


def _attend_gpu(
    device: str, shapes: list[Heads], lengths: tuple[int, ...], batches: tuple[int, ...], names: tuple[str, ...],
    seconds: float, limit: float, out: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from tersekv.lab.bench.attend_gpu import measure
    from tersekv.lab.bench.clock_gpu import CudaClock

    if device != "cuda":
        raise UserError(f"--device {device!r}: allowed are cpu and cuda")
    clock, results, stop = CudaClock(), [], time.monotonic() + 60 * limit
    contexts = list(itertools.product(shapes, lengths, batches))
    with output.step("compiling kernels", len(contexts), "contexts") as step:
        for done, (shape, length, batch) in enumerate(contexts):
            step.at(done, what=f"timing {shape}, {batch} x {length:,} tokens")
            measured = measure(clock, shape, batch, length, names, seconds, stop=stop)
            results.append(measured)
            if out is not None:
                _write(out, "attend_gpu", [_gpu_machine(clock.name) | row for row in measured.results()])
    if as_json:
        output.print_json({"results": [row for measured in results for row in measured.results()]})
    else:
        for measured in results:
            for way, reason in measured.missing.items():
                output.report(f"{measured.batch} x {measured.tokens:,} tokens: {way} did not run: {reason}")
        for measured in results:
            output.show(_gpu_table(measured))
    if untimed := [name for name in names if any(name in measured.missing for measured in results)]:
        reason = next(measured.missing[untimed[0]] for measured in results if untimed[0] in measured.missing)
        raise UserError(f"not timed everywhere: {', '.join(untimed)} ({untimed[0]}: {reason})")


def _gpu_machine(name: str) -> dict[str, Any]:
    from tersekv.cli.env import package_version

    return {"gpu": name} | {package: package_version(package) for package in ("triton", "flashinfer-python")}


def _gpu_table(measured: MeasuredGpu) -> Any:
    title = (
        f"{measured.machine}: {measured.heads} (query heads / KV heads / head dim), {measured.batch} x "
        f"{measured.tokens:,} tokens; a copy moves {measured.bandwidth:,.0f} GB/s"
    )
    columns = ("way", "bits", "µs", "p10–p90", "share of floor", "× bfloat16", "error", "encode µs/token")
    rows = [
        (
            row["what"], row["bits"] or "", f"{row['median_us']:.1f}", f"{row['p10']:.1f}–{row['p90']:.1f}",
            f"{row['share_of_floor']:.2f}", f"{row['speedup_bfloat16']:.2f}", f"{row['relative_error']:.1e}",
            "" if row["encode_us_per_token"] is None else f"{row['encode_us_per_token']:.1f}",
        )
        for row in measured.results()
    ]  # fmt: skip
    return output.table(title, columns, rows)


@app.command()
def generate(
    recipe: Annotated[list[str] | None, typer.Option("--recipe", "-r", help=CACHES_HELP)] = None,
    model: Annotated[str, typer.Option("--model", "-m", help=output.MODEL_HELP)] = "smollm2",
    depths: Annotated[str, typer.Option("--depths", help="Tokens in the cache, like 0,1k,8000.")] = "0,1k,4k,8000",
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens timed in each round.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds, in which all caches take turns.")] = 3,
    calibration: output.Calibrations = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Append JSON lines, one per cache and depth.")] = None,
    as_json: output.Json = False,
) -> None:
    """Decoding speed with a model at several depths; transformers' own cache is always one of the caches."""
    lengths = [0 if part.strip() == "0" else parse_lengths(part, "--depths")[0] for part in depths.split(",")]
    network, tokenizer = load(model)
    from tersekv.lab.bench.generate import run

    found = []
    with output.step("making prompts", unit="timings") as step:
        for decoding in run(
            network, tokenizer, recipe or [output.DEFAULT_RECIPE], lengths, new_tokens, rounds, calibration,
            output.report, step.at,
        ):  # fmt: skip
            found.append(decoding)
            if out is not None:
                _write(out, "generate", [{"model": model, "new_tokens": new_tokens, **decoding.document()}])
    if as_json:
        output.print_json({"model": model, "results": [decoding.document() for decoding in found]})
        return
    output.show(_speeds(found))


def _speeds(found: list[Decoding]) -> Any:
    """One row per cache and depth; times faster than transformers' own cache, round by round."""
    full = {decoding.depth: decoding.rates for decoding in found if decoding.cache == "full"}
    rows = []
    for decoding in found:
        ratios = [mine / theirs for mine, theirs in zip(decoding.rates, full[decoding.depth], strict=True)]
        held = "" if decoding.bytes is None else output.human_bytes(decoding.bytes)
        rows.append((
            decoding.cache, f"{decoding.depth:,}", f"{decoding.tokens_per_second:.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})", held,
            "" if decoding.peak_bytes is None else output.human_bytes(decoding.peak_bytes),
        ))  # fmt: skip
    return output.table("decoding", ("cache", "depth", "tokens/s", "× full", "held", "peak"), rows)


def _machine(bench: str) -> dict[str, Any]:
    import torch

    from tersekv.kernels import cpu

    isa = cpu.isa() if cpu.why_not_built() is None else None
    return {"bench": bench, "isa": isa, "cpu": cpu_features()[0], "torch": torch.__version__}


def _append(path: Path, measured: Measured) -> None:
    common = {"read_gb_per_s": round(measured.bandwidth, 2)}
    _write(path, "attend", [common | row.record() for row in measured.rows])


def _write(path: Path, bench: str, rows: list[dict[str, Any]]) -> None:
    import torch

    common = _machine(bench) | ({"torch_threads": torch.get_num_threads()} if bench == "generate" else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(common | row) + "\n" for row in rows)


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
