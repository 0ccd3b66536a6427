"""`tersekv bench`: measure attention over packed bytes, compared with dense attention, and decoding
with a model."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tersekv.cli import output
from tersekv.cli.bare import Cell, size
from tersekv.cli.files import refuse_folder
from tersekv.cli.generate import load, use_threads
from tersekv.cli.installation import run_header
from tersekv.errors import UserError
from tersekv.units import parse_lengths, parse_numbers, parse_tokens
from tersekv.versions import package_version

if TYPE_CHECKING:
    from tersekv.lab.bench.attend import HeadCounts, Measured
    from tersekv.lab.bench.attend_gpu import Measured as MeasuredGpu
    from tersekv.lab.bench.generate import Decoding

CACHES_HELP = "Recipe, or a cache of transformers: quanto-4, quanto-2, hqq-4, hqq-2, fp8. May be repeated."
DTYPES = ("float32", "bfloat16", "float16")
DTYPES_HELP = "float32, bfloat16 or float16, separated by commas"
PREFILL_CHUNK_HELP = "Prompt tokens per forward pass, or whole for one pass. Several separated by commas."
TIMED_MODEL_HELP = f"{output.MODEL_HELP} A config.json for random weights."
GENERATE_OUT_HELP = "Append JSON lines to this file, one per dtype, prefill chunk, context and cache."
SPEED_NOTES = (
    "× full: speed relative to transformers' own cache in the same round.",
    "turn: time to read 512 more tokens, – where they exceed the model's limit.",
)

app = typer.Typer(help="Measure speed on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure speed on this machine."""


@app.command()
def attend(
    tokens: Annotated[str, typer.Option("--tokens", help="Context lengths, for example 1k,32k.")] = "32k",
    heads: Annotated[str, typer.Option("--heads", help="Query heads/KV heads/head dim, separated by commas.")] = (
        "32/8/128"
    ),
    formats: Annotated[str, typer.Option("--formats", help="Packed formats, separated by commas, or all.")] = (
        "grid4,grid3,grid2"
    ),
    threads: Annotated[str, typer.Option("--threads", help="Numbers of threads, for example 1,2.")] = "1",
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="Seconds of measurement per context.")] = 6.0,
    device: Annotated[str, typer.Option("--device", help="Device: cpu or cuda.")] = "cpu",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes on a GPU, for example 1,8.")] = "1",
    limit: Annotated[
        float, typer.Option("--limit", min=0.0, help="On a GPU: minutes after which no format starts.")
    ] = 8.0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Append JSON lines to this file.")] = None,
    as_json: output.Json = False,
) -> None:
    """Measure one token's attention to packed keys and values.

    Dense attention and memory bandwidth are measured for comparison.
    """
    from tersekv.lab.bench.attend import HeadCounts, measure
    from tersekv.lab.bench.formats import chosen

    shapes = [HeadCounts.parse(part) for part in heads.split(",")]
    names = chosen(formats)
    if out is not None:
        refuse_folder(out)
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
            read = {"read_gb_per_s": round(measured.bandwidth, 2)}
            _write(out, "attend", {}, [read | row.record() for row in measured.rows])
        if not as_json:
            output.show(_table(measured))
    if as_json:
        output.print_json({"results": results})


def _attend_gpu(
    device: str, shapes: list[HeadCounts], lengths: tuple[int, ...], batches: tuple[int, ...], names: tuple[str, ...],
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
                _write(out, "attend_gpu", _gpu_machine(clock.name), measured.results())
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
    return {"gpu": name} | {package: package_version(package) for package in ("triton", "flashinfer-python")}


def _gpu_table(measured: MeasuredGpu) -> Any:
    title = (
        f"{measured.machine}: {measured.heads} (query heads / KV heads / head dim), {measured.batch} x "
        f"{measured.tokens:,} tokens; a copy moves {measured.bandwidth:,.0f} GB/s"
    )
    columns = ("way", "bits", "µs", "p10–p90", "share of floor", "× bfloat16", "error", "encode µs/token")
    rows = [
        (
            row["what"], row["bits"] or "", f"{row['median_us']:.1f}", _between(row["p10"], row["p90"], "µs", 1),
            f"{row['share_of_floor']:.2f}", f"{row['speedup_bfloat16']:.2f}", f"{row['relative_error']:.1e}",
            "" if row["encode_us_per_token"] is None else f"{row['encode_us_per_token']:.1f}",
        )
        for row in measured.results()
    ]  # fmt: skip
    return output.table(title, columns, rows)


@app.command()
def generate(
    recipe: Annotated[list[str] | None, typer.Option("--recipe", "-r", help=CACHES_HELP)] = None,
    model: Annotated[str, typer.Option("--model", "-m", help=TIMED_MODEL_HELP)] = "smollm2",
    dtype: Annotated[str, typer.Option("--dtype", help=f"Type of weights and activations: {DTYPES_HELP}.")] = (
        "float32,bfloat16"
    ),
    context: Annotated[str, typer.Option("--context", help="Context lengths, for example 1k,8000.")] = "1k,4k,8000",
    prefill_chunk: Annotated[str, typer.Option("--prefill-chunk", help=PREFILL_CHUNK_HELP)] = "whole,512",
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens timed in each round.")] = 32,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Number of rounds; each times every cache.")] = 3,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Number of CPU threads.")] = None,
    device: Annotated[str, typer.Option("--device", help="Device: cpu or cuda.")] = "cpu",
    calibration: output.Calibrations = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help=GENERATE_OUT_HELP)] = None,
    as_json: output.Json = False,
) -> None:
    """Measure a model's decoding speed at several context lengths.

    It also shows the time to read the prompt, and a second turn of 512 tokens after it.
    Transformers' own cache (full) is always measured, too.
    """
    dtypes, lengths, chunks = _dtypes(dtype), parse_lengths(context, "--context"), _chunks(prefill_chunk)
    check_device(device)
    if out is not None:
        refuse_folder(out)
    use_threads(threads)
    caches = recipe or [output.DEFAULT_RECIPE]
    documents: list[dict[str, Any]] = []
    for name in dtypes:
        network, tokenizer = _timed_model(model, name, device)
        from tersekv.lab.bench.generate import run

        found = []
        common = {"model": model, "new_tokens": new_tokens, "load": _load(), **_device_facts(device)}
        with output.step("making prompts", unit="timings") as step:
            for decoding in run(
                network, tokenizer, caches, lengths, chunks, new_tokens, rounds, calibration, report=output.report,
                progress=step.at,
            ):  # fmt: skip
                found.append(decoding)
                if out is not None:
                    _write(out, "generate", common, [decoding.document()])
        documents += [decoding.document() for decoding in found]
        if not as_json:
            for made in speeds(model, found, caches):
                output.show(made)
        del network  # before the next one is loaded
    if as_json:
        output.print_json({"model": model, "results": documents})


def check_device(device: str) -> None:
    """Raise UserError unless the device is the CPU or a CUDA device of this machine."""
    import torch

    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device!r}: allowed are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device")


def _timed_model(model: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Return (model, tokenizer) on the device; random weights and no tokenizer for a config file."""
    if model.endswith(".json"):
        from tersekv.models.loading import expanded, random_model

        return random_model(expanded(model), dtype, device), None
    network, tokenizer = load(model, dtype)
    return network.to(device), tokenizer


def _device_facts(device: str) -> dict[str, Any]:
    """Return what records say of a GPU; nothing for the CPU."""
    import torch

    return _gpu_machine(torch.cuda.get_device_name()) if device == "cuda" else {}


def _dtypes(text: str) -> list[str]:
    """Parse --dtype into names of torch's dtypes, each once and in the given order."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if wrong := [name for name in names if name not in DTYPES]:
        raise UserError(f"--dtype {wrong[0]!r} is not one of: {', '.join(DTYPES)} (several with commas)")
    return names


def _chunks(text: str) -> list[int | None]:
    """Parse --prefill-chunk into numbers of tokens, each once and in the given order; None for
    `whole`."""
    found: dict[int | None, None] = {}
    for part in text.split(","):
        try:
            found[None if part.strip() == "whole" else parse_tokens(part, "--prefill-chunk")] = None
        except UserError as error:
            raise UserError(
                f"--prefill-chunk {part.strip()!r}: write `whole` for a prompt that is read in one pass, or the tokens "
                "of a pass like 512; several with commas"
            ) from error
    return list(found)


def _load() -> float | None:
    """Return the system's load average of the last minute; None if the system does not report
    it."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def speeds(model: str, found: Sequence[Decoding], asked: Sequence[str]) -> list[output.Tables]:
    """Return a table per dtype and prefill chunk, with a row per context and cache: median, least
    and most over the rounds. asked: the caches as the user wrote them, so that presets are shown by
    name."""
    import torch

    from tersekv.lab.evals.names import names_as_asked

    names = names_as_asked([decoding.cache for decoding in found], asked)
    tables: dict[tuple[str, int | None], list[Decoding]] = {}
    for decoding in found:
        tables.setdefault((decoding.dtype, decoding.prefill_chunk), []).append(decoding)
    made = []
    for (dtype, chunk), rows in tables.items():
        read = "prompt read whole" if chunk is None else f"prompt in chunks of {chunk:,}"
        notes = [
            f"{names[cache]} = {cache}" for cache in dict.fromkeys(row.cache for row in rows) if names[cache] != cache
        ]
        made.append(
            output.table(
                f"{Path(model).name}, {dtype}, {read}, threads: {torch.get_num_threads()}; medians (least–most) of "
                f"{len(rows[0].step_ms)} rounds",
                ("cache", "context", "ms per token", "× full", "prefill s", "turn s", "held"),
                [_speed(row, names[row.cache]) for row in rows],
                notes=[*notes, *SPEED_NOTES],
            )
        )
    return made


def _speed(decoding: Decoding, name: str) -> tuple[str, ...]:
    step, ratio = decoding.step_ms, decoding.times_full
    return (
        name, f"{decoding.context:,}", _spread(step, _short), _spread(ratio, "{:.2f}".format),
        _short(statistics.median(decoding.prefill_seconds)),
        _short(statistics.median(decoding.turn_seconds)) if decoding.turn_seconds else "–",
        "" if decoding.bytes is None else size(decoding.bytes),
    )  # fmt: skip


def _spread(values: Sequence[float], written: Callable[[float], str]) -> Cell:
    """Return a cell with median, least and most."""
    low, middle, high = min(values), statistics.median(values), max(values)
    text = f"{written(middle)} ({written(low)}–{written(high)})"
    return Cell(text, {"{}": middle, "{}, least": low, "{}, most": high})


def _between(low: float, high: float, unit: str, places: int) -> Cell:
    """Return a cell with the 10th and the 90th percentile."""
    numbers = {f"p10 ({unit})": round(low, places), f"p90 ({unit})": round(high, places)}
    return Cell(f"{low:.{places}f}–{high:.{places}f}", numbers)


def _short(x: float) -> str:
    """Format a number with one decimal, or none from 100."""
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.1f}"


def _write(path: Path, bench: str, common: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from tersekv.lab.evals.records import versions
    from tersekv.lab.evals.runs import append

    append(path, {"bench": bench, **run_header(), "versions": versions(), **common}, rows)


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
            _between(row.time.p10, row.time.p90, "ms", 2), f"{row.bytes / row.time.ms / 1e6:.1f}", *ratios,
            f"{row.error:.1e}" if result else "",
        ))  # fmt: skip
    return output.table(title, columns, rows)
