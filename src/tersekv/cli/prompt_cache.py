"""`tersekv prompt-cache`: read a prompt once and keep its packed cache in a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tersekv.cli import output, sizes
from tersekv.cli.bare import size as sized
from tersekv.cli.files import check_out
from tersekv.cli.generate import PrefillChunk, chunk_of, load, read_text, warn_of_loss
from tersekv.versions import cache_argument

COMPARED = 128
"""Tokens that are read after a storage file was written, to measure its divergence."""

app = typer.Typer(help="Keep packed caches of prompts in files, to read each prompt only once.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(help="File from `tersekv prompt-cache build`.")]
RAW_HELP = "Do not use the model's chat template."
STORAGE_HELP = (
    "Bits per number, for example 2: write a smaller storage file, which loads into a cache of any --recipe. "
    "`tersekv calibrate --storage` makes it smaller still."
)
BASES = {
    "calibration": "those of the model's calibration",
    "prompt": "of this prompt, over several layers",
    "layer": "of this prompt, layer by layer",
}
"""Bases of a storage file, in words."""

ADVICE = {
    "prompt": "`tersekv calibrate --storage` saves the bytes of these bases.",
    "layer": "`tersekv calibrate --storage` gives better bases.",
}
"""Lines below the table of a storage file, by its bases."""


@app.command()
def build(
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help=output.RECIPE_HELP)] = output.DEFAULT_RECIPE,
    model: Annotated[str, typer.Option("--model", "-m", help=output.MODEL_HELP)] = "smollm2",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text that prompts begin with.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File with that text; - is standard input.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help=RAW_HELP)] = False,
    storage: Annotated[float | None, typer.Option("--storage", help=STORAGE_HELP)] = None,
    prefill_chunk: PrefillChunk = None,
    calibration: output.Calibrations = None,
    as_json: output.Json = False,
) -> None:
    """Read a text and write its packed cache to a file for `tersekv generate`.

    The file holds the tokens that all prompts with this text share, for any --question.
    """
    text = read_text(prompt, file, None)
    out, chunk = check_out(out), chunk_of(prefill_chunk)
    if storage is not None:
        from tersekv.storage.codec import check_rate
        from tersekv.storage.streams import require_packages

        check_rate(storage)
        require_packages("--storage")
        recipe = "exact"
    with output.step("loading torch and transformers"):
        import torch

        import tersekv
        from tersekv.calibration.find import calibration_for
        from tersekv.calibration.text import common_ids
        from tersekv.cli import measure
        from tersekv.models.config import cache_shape
    network, tokenizer = load(model)
    with output.step("looking for the calibration"):
        learnt = calibration_for(network, recipe, calibration)
    ids = common_ids(tokenizer, text, network.config, raw)
    cache = tersekv.CompressedCache(network.config, recipe, learnt)
    start = time.perf_counter()
    parts = ids.split(chunk or ids.shape[1], dim=1)
    progress = measure.prefill_progress(network, passes=len(parts))
    with tersekv.compress(network, recipe, learnt), torch.inference_mode(), progress:
        for part in parts:
            network(input_ids=part, use_cache=True, logits_to_keep=1, **cache_argument(network, cache))
    read, start = time.perf_counter() - start, time.perf_counter()
    with output.step(f"writing {out}"):
        cache.save(out, ids, storage=storage)
    more: dict[str, Any] = {"prefill_seconds": round(read, 4), "save_seconds": round(time.perf_counter() - start, 4)}
    if storage is not None:
        with output.step(f"comparing {out} with the prompt"):
            kl = divergence(network, cache, out, ids)
            if kl is not None:
                add_divergence(out, kl)
        _say(out, as_json, more)
        warn_of_loss(out, kl, "give more bits, or run `tersekv calibrate --storage` for this model first")
        return
    _say(out, as_json, more)
    gained = sizes.nothing_gained(cache.footprint(), cache_shape(network.config), str(cache.recipe))
    if gained and not as_json:
        output.show(gained)


def divergence(network: Any, cache: Any, path: Path, ids: Any) -> float | None:
    """Return the mean KL divergence in nats of tokens after those of a cache, once it was written to a storage file.

    They are read again from the middle of the prompt, so that the model looks for them there. None if they do not
    fit into the model's context. ids: of the cache [1, T].
    """
    import torch

    import tersekv
    from tersekv.lab.evals.tasks.divergence import compare
    from tersekv.models.config import longest_context

    tokens = ids.shape[1]
    again = ids[:, tokens // 2 :][:, :COMPARED].to(network.device)
    if tokens + again.shape[1] > (longest_context(network.config) or tokens + COMPARED):
        return None
    logits = []
    for one in (cache, tersekv.CompressedCache.load(path, network, ids, recipe="exact")):
        with tersekv.compress(network, one), torch.inference_mode():
            logits.append(network(input_ids=again, **cache_argument(network, one)).logits[0])
    return round(float(compare(*logits)[0].mean()), 5)


def add_divergence(path: Path, kl: float) -> None:
    """Write the measured divergence in nats into the metadata of a storage file."""
    from tersekv.cache import tensor_file

    said, tensors, _ = tensor_file.read(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # a mapped file may not be replaceable
    tensor_file.write(path, tensors, {**said, "kl": kl})


@app.command("load")
def load_file(
    file: File,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output file.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help=output.RECIPE_HELP)] = output.DEFAULT_RECIPE,
    model: Annotated[str, typer.Option("--model", "-m", help=output.MODEL_HELP)] = "smollm2",
    calibration: output.Calibrations = None,
    as_json: output.Json = False,
) -> None:
    """Pack a storage file with a recipe, and write the packed cache to another file."""
    from tersekv.cache.tensor_file import read_said

    out = check_out(out)
    read_said(file.expanduser())  # before the model is loaded
    with output.step("loading torch and transformers"):
        import tersekv
    network, _ = load(model)
    start = time.perf_counter()
    with output.step(f"loading {file}"):
        cache = tersekv.CompressedCache.load(file, network, recipe=recipe, calibration=calibration)
    seconds = {"load_seconds": round(time.perf_counter() - start, 4)}
    cache.save(out, cache.token_ids.joined())
    _say(out, as_json, seconds)
    warn_of_loss(file, cache.stored_kl, f"{out} loses no less; build the storage file again with more bits")


@app.command()
def info(file: File, as_json: output.Json = False) -> None:
    """Show the contents of a prompt cache. Only its header is read and checked."""
    _say(file, as_json, {})


@app.command()
def verify(
    file: File,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Also load the file for this model.")] = None,
    as_json: output.Json = False,
) -> None:
    """Verify the checksums of a prompt cache.

    With --model, also load it as `tersekv generate` does.
    """
    from tersekv.cache import tensor_file

    with output.step(f"reading {file}"):
        tensor_file.read(file.expanduser())
    if model is not None:
        network, _ = load(model)
        import tersekv

        with output.step(f"loading {file}"):
            tersekv.CompressedCache.load(file, network)
    _say(file, as_json, {"state": "verified"})


def _say(file: Path, as_json: bool, more: dict[str, Any]) -> None:
    from tersekv.cache.tensor_file import read_said
    from tersekv.lab.evals.tasks.divergence import in_words

    said, size = read_said(file.expanduser())
    held = said["cache"]
    document = {
        "file": str(file),
        "file_bytes": size,
        **{name: said[name] for name in ("recipe", "model_type", "model", "batch", "ids_sha256", "tersekv")},
        **({"storage": stored} if (stored := said.get("storage")) else {}),
        **({} if (kl := said.get("kl")) is None else {"kl": kl, "words": in_words(kl)}),
        "cache": held,
        **more,
    }
    if as_json:
        output.print_json(document)
        return
    known = "unknown" if said["ids_sha256"] is None else said["ids_sha256"][:16]
    stored_rows = () if not stored else (("bits per number", f"{stored['rate']:g}"), ("bases", BASES[stored["bases"]]))
    rows = [
        ("recipe", said["recipe"]),
        *stored_rows,
        ("model", f"{said['model_type']} {said['model'][:16]}"),
        ("tokens", f"{held['tokens']:,}" if said["batch"] == 1 else f"{said['batch']} × {held['tokens']:,}"),
        ("token ids", known),
        ("file", sized(size)),
        ("cache, all parts", sized(held["bytes"])),
        ("which is", sizes.against_bfloat16(held["bytes"], round(held["bytes"] * held["ratio_bf16"]))),
        *(() if kl is None else (("divergence, nats", f"{kl:.4f}"), ("in words", in_words(kl)))),
        ("written by tersekv", said["tersekv"]),
        *((name.replace("_", " "), str(value)) for name, value in more.items()),
    ]
    words = ("recipe", "bases", "model", "token ids", "which is", "in words", "written by tersekv")
    notes = [ADVICE[stored["bases"]]] if stored and stored["bases"] in ADVICE else []
    if kl is not None:
        what = "this file" if stored else "the storage file that these tokens are from"
        notes.append(f"The divergence is that of {what}, measured when it was built.")
    output.show(output.table(str(file), ("", ""), rows, notes=notes, words=words, by_column="prompt cache"))
