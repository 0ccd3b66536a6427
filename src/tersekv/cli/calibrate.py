"""`tersekv calibrate`: fit codecs on a corpus and measure the importance of heads, once per model."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tersekv.cli import output
from tersekv.cli.bare import size
from tersekv.cli.generate import Dtype, checked_dtype, load
from tersekv.errors import UserError

if TYPE_CHECKING:
    from tersekv.calibration.calibrate import Calibrator
    from tersekv.calibration.calibration import Calibration
    from tersekv.recipe import Recipe

RECIPES_HELP = f"{output.RECIPE_HELP} May be repeated, with one pass over the text; bits=2..4 gives several recipes."
STORAGE_HELP = "Fit the bases of storage files (`prompt-cache build --storage`), in place of a recipe or beside it."
OUT_HELP = "Output file (for one recipe) or folder. By default a folder that the other commands search."


def calibrate(
    recipe: Annotated[list[str] | None, typer.Option("--recipe", "-r", help=RECIPES_HELP)] = None,
    storage: Annotated[bool, typer.Option("--storage", help=STORAGE_HELP)] = False,
    model: Annotated[str, typer.Option("--model", "-m", help=output.MODEL_HELP)] = "smollm2",
    text: Annotated[
        str, typer.Option("--text", "-t", help="Text file, or pydoc (Python's language reference).")
    ] = "pydoc",
    samples: Annotated[int, typer.Option(min=1, help="Number of samples, at random positions of the text.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens per sample.")] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the positions.")] = 0,
    sinks: Annotated[int, typer.Option(min=0, help="Tokens left out at the start of each sample.")] = 1,
    out: Annotated[Path | None, typer.Option("--out", "-o", help=OUT_HELP)] = None,
    dtype: Dtype = "auto",
    workers: Annotated[int, typer.Option(min=0, help="Processes that fit codecs; 0 is one per core.")] = 0,
    as_json: output.Json = False,
) -> None:
    """Measure a model once, for recipes that need calibration.

    Codebooks and thresholds are fitted on the text. A run that was stopped continues where it was.
    For headkv, the importance of heads is measured on needles hidden in the text. For mixed with
    allot=model, it is measured how attention spreads over the tokens of the text.
    """
    with output.step("loading torch and transformers"):
        from tersekv.lab.evals.products import expand, unique
        from tersekv.lab.evals.windows import read_text
        from tersekv.recipe import Recipe

        recipes = [Recipe.parse(one) for one in unique(one for product in recipe or () for one in expand(product))]
    if not recipes and not storage:
        raise UserError("there is nothing to calibrate: give --recipe RECIPE, or --storage for storage files")
    _check_out(out, len(recipes) + storage)
    checked_dtype(dtype)
    read = read_text(text)
    network, tokenizer = load(model, dtype)
    from tersekv.calibration.attention_spread import profile_on
    from tersekv.calibration.calibrate import Calibrator, Corpus
    from tersekv.calibration.find import check_allotment
    from tersekv.calibration.needs import needs_corpus, needs_profile, profile_of
    from tersekv.calibration.storage_basis import basis_on
    from tersekv.lab.bench.memory import PeakMemory

    for one in recipes:
        check_allotment(one, network.config)
    profiles = {profile_of(one): one for one in recipes if needs_profile(one, network.config)}
    of_heads = {name for name, one in profiles.items() if one.policy().needs_scores}
    fitted = [one for one in recipes if needs_corpus(one, network.config) or not needs_profile(one, network.config)]
    _check_out(out, len(fitted) + len(profiles) + storage)
    _check_length(length, network)
    name = text if text == "pydoc" else Path(text).name
    start = time.perf_counter()
    files: list[tuple[str, Path, Calibration]] = []
    peaks = {"peak_worker_bytes": 0, "disk_bytes": 0}
    with PeakMemory() as memory:
        about = {"corpus": name, "corpus_sha256": _sha256(read), "samples": samples, "length": length, "seed": seed}
        files += [_save_profile(_measure(network, tokenizer, text, about, str(name)), out) for name in of_heads]
        if fitted or storage or len(of_heads) < len(profiles):
            with output.step(f"tokenising {name}"):
                corpus = Corpus.draw(name, read, tokenizer(read, verbose=False)["input_ids"], samples, length, seed)
            others = [one for name, one in profiles.items() if name not in of_heads]
            for one in others:
                spread = _on(samples, "measuring attention", partial(profile_on, network, one, corpus))
                files.append(_save_profile(spread, out))
            if storage:
                bases = _on(samples, "computing gradients", partial(basis_on, network, corpus, sinks))
                files.append(_save_profile(bases, out))
        if fitted:
            run = Calibrator(network, fitted, corpus, sinks, workers or os.cpu_count() or 1)
            found = _run(run)
            files += zip(map(str, fitted), _save(found, fitted, out, run), found, strict=True)
            peaks = {"peak_worker_bytes": run.peak_worker_bytes, "disk_bytes": run.work_bytes}
    document = {
        "model": model,
        "corpus": {"name": name, "sha256": _sha256(read), "samples": samples, "length": length, "seed": seed},
        "sinks": sinks,
        "files": [
            {"recipe": part, "path": str(path), "bytes": path.stat().st_size, "digest": calibration.digest}
            for part, path, calibration in files
        ],
        "seconds": round(time.perf_counter() - start, 1),
        "peak_bytes": memory.peak_bytes,
        **peaks,
    }
    if as_json:
        output.print_json(document)
    else:
        _show(document)


def _check_out(out: Path | None, recipes: int) -> None:
    if out is None:
        return
    if recipes > 1 and (out.is_file() or out.suffix == ".safetensors"):
        raise UserError(f"--out {out} is a file, and these recipes need {recipes} files: give a folder")
    if recipes == 1 and not out.is_dir() and out.suffix != ".safetensors":
        raise UserError(
            f"--out {out} is not a folder and does not end in .safetensors: give an existing folder or such a file"
        )
    folder = out if recipes > 1 or out.is_dir() else out.parent
    above = next(place for place in (folder, *folder.parents) if place.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {above} is not a folder that can be written; give another")


def _check_length(length: int, network: Any) -> None:
    from tersekv.models.config import longest_context

    context = longest_context(network.config)
    if context and length > context:
        raise UserError(f"--length {length:,} is more than the model's context of {context:,} tokens: give fewer")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _measure(network: Any, tokenizer: Any, text: str, about: dict[str, Any], profile: str) -> Calibration:
    """Return the importance of a model's heads. about: name and hash of the text, samples, length, seed."""
    from tersekv.calibration.calibration import SCORES, Calibration, Made
    from tersekv.calibration.head_scores import measure
    from tersekv.lab.evals.answered import answered_prompts
    from tersekv.lab.evals.reader import Reader
    from tersekv.models.fingerprint import architecture, fingerprint

    samples, length, seed = (about[name] for name in ("samples", "length", "seed"))
    prompts = answered_prompts(Reader(network, tokenizer), text, samples, length, seed)
    scores = _on(samples, "measuring heads", partial(measure, network, prompts))
    made = Made(recipe=profile, architecture=architecture(network.config), model=fingerprint(network), sinks=0, **about)
    return Calibration(made, {SCORES: scores})


def _on(samples: int, doing: str, measure: Callable[..., Any]) -> Any:
    """Return what is measured on a number of samples, and show the progress."""
    with output.step(doing, samples, "samples") as step:
        found = measure(step.at)
        step.at(samples, samples)
    return found


def _save_profile(found: Calibration, out: Path | None) -> tuple[str, Path, Calibration]:
    """Write the measurement of a token policy, or the bases of storage files."""
    from tersekv.calibration.find import default_folder, profile_place

    folder = default_folder(found.made.model) if out is None else out
    path = out if out is not None and out.suffix == ".safetensors" else profile_place(folder, found.made.recipe)
    found.save(path)
    return found.made.recipe, path, found


def _run(run: Calibrator) -> list[Calibration]:
    units = {"means": "samples", "samples": "samples", "layers": "sides of layers", "sums": "sides of layers"}
    names = {"means": "reading the text", "samples": "computing gradients", "layers": "fitting", "sums": "fitting"}
    with output.step("reading the text") as step:

        def progress(phase: str, done: int, total: int) -> None:
            if step.what != names[phase]:
                step.begin(names[phase], total, units[phase])
            step.at(done, total)

        try:
            return run.run(progress)
        except KeyboardInterrupt:
            output.report(f"stopped; {run.work} keeps the finished part: the same command continues from there")
            raise


def _save(found: Sequence[Calibration], recipes: Sequence[Recipe], out: Path | None, run: Calibrator) -> list[Path]:
    """Write every calibration, then remove the work folder."""
    from tersekv.calibration.find import default_folder, place

    folder = default_folder(run.mark) if out is None else out
    one_file = out is not None and len(recipes) == 1 and not out.is_dir()
    paths = [folder if one_file else place(folder, recipe) for recipe in recipes]
    for path, calibration in dict(zip(paths, found, strict=True)).items():  # one file serves all rates
        calibration.save(path)
    run.clean()
    return paths


def _show(document: dict[str, Any]) -> None:
    corpus = document["corpus"]
    title = f"calibrated on {corpus['samples']} × {corpus['length']:,} tokens of {corpus['name']}"
    rows = [(made["recipe"], made["path"], size(made["bytes"])) for made in document["files"]]
    output.show(output.table(title, ("recipe", "file", "size"), rows, left=2))
    worker = document["peak_worker_bytes"]
    output.show(
        f"{document['seconds']:,.0f} s; peak memory {output.human_bytes(document['peak_bytes'])} in addition to the "
        f"model{f', {output.human_bytes(worker)} in a fitting process' if worker else ''}; "
        f"{output.human_bytes(document['disk_bytes'])} of temporary files on disk"
    )
