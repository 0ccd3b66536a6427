"""`tersekv generate`: answer a prompt with a packed cache, and show the size of the cache."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tersekv.cli import output, sizes
from tersekv.cli.bare import Cell, size
from tersekv.errors import UserError
from tersekv.units import parse_tokens

if TYPE_CHECKING:
    from tersekv.cli.measure import Outcome

log = logging.getLogger(__name__)
MOST_KL = 0.03
"""Divergence in nats above which a storage file is warned of."""

RECIPE_HELP = f"{output.RECIPE_HELP} If not given: `{output.DEFAULT_RECIPE}`, or the recipe of the prompt cache."
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_HELP = "Type of weights and activations: float32, bfloat16, float16, or auto, which is the checkpoint's."
CHUNK_HELP = "Prompt tokens per forward pass, for example 512: less memory for long prompts, more time."
FROM_FILE_HELP = "File from `tersekv prompt-cache build` with the beginning of this prompt."
Dtype = Annotated[str, typer.Option("--dtype", help=DTYPE_HELP)]
PrefillChunk = Annotated[str | None, typer.Option("--prefill-chunk", help=CHUNK_HELP, show_default="the whole prompt")]


def chunk_of(given: str | None) -> int | None:
    """Return the tokens of `--prefill-chunk`, None for the whole prompt."""
    return None if given is None else parse_tokens(given, "--prefill-chunk")


def check_temperature(temperature: float) -> None:
    """Raise UserError unless a temperature is 0 or in a range in which logits stay finite."""
    if temperature != 0 and not 0.001 <= temperature <= 1000:
        raise UserError(f"--temperature {temperature} is out of range: 0 is greedy, else 0.001 to 1000")


def checked_dtype(dtype: str) -> str:
    """Return the type of the weights, if it is one of `DTYPES`."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype!r} is not one of: {', '.join(DTYPES)}")
    return dtype


def generate(
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help=RECIPE_HELP)] = None,
    model: Annotated[str, typer.Option("--model", "-m", help=output.MODEL_HELP)] = "smollm2",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text of the prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File with the prompt; - is standard input.")
    ] = None,
    question: Annotated[str | None, typer.Option("--question", "-q", help="Question, appended to the prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in the answer.")] = 128,
    compare: Annotated[bool, typer.Option("--compare", help="Also answer with the full cache, and compare.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")] = False,
    dtype: Dtype = "auto",
    prefill_chunk: PrefillChunk = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads.")] = None,
    calibration: output.Calibrations = None,
    prompt_cache: Annotated[Path | None, typer.Option("--prompt-cache", help=FROM_FILE_HELP)] = None,
    as_json: output.Json = False,
) -> None:
    """Answer a prompt with a packed cache. The prompt is --prompt, --file, or standard input."""
    check_temperature(temperature)
    checked_dtype(dtype)
    chunk = chunk_of(prefill_chunk)
    text = read_text(prompt, file, question)
    with output.step("loading torch and transformers"):
        from tersekv.calibration import text as prompts
        from tersekv.calibration.find import calibration_for
        from tersekv.cli import measure
        from tersekv.lab.evals.tasks.divergence import AnswerDivergence
        from tersekv.serving.local.answers import Sampling

        use_threads(threads)
        parsed = _recipe(recipe, prompt_cache)
    network, tokenizer = load(model, dtype)
    with output.step("looking for the calibration"):
        learnt = None if prompt_cache else calibration_for(network, parsed, calibration)
    whole = text if raw else prompts.chat_prompt(tokenizer, text)
    ids = prompts.input_ids(tokenizer, whole, network.config, max_new_tokens, template=not raw)
    sampling = Sampling(max_new_tokens, temperature, seed=seed, prefill_chunk=chunk)
    outcomes: list[Outcome] = []
    watch = AnswerDivergence() if compare else None
    for choice in (None, parsed) if compare else (parsed,):
        if not as_json and compare:
            output.show(f"--- {'full cache' if choice is None else choice}")
        write = None if as_json else output.stream
        held = None
        if choice is not None and prompt_cache is not None:
            import tersekv

            with output.step(f"loading {prompt_cache}"):
                held = tersekv.CompressedCache.load(prompt_cache, network, ids, tokenizer.decode, choice, calibration)
            warn_of_loss(prompt_cache, held.stored_kl, "build the storage file again with more bits")
        outcomes.append(measure.generate(network, tokenizer, ids, choice, sampling, write, learnt, held, watch))
    differs = None if watch is None else measure.compared(watch, *outcomes)
    if as_json:
        documents = [outcome.document() for outcome in outcomes]
        output.print_json(
            documents[0] if differs is None else {"full": documents[0], "packed": documents[1], **differs}
        )
        return
    output.show(summary(outcomes, f"{ids.shape[1]:,} prompt tokens", differs))
    say_where_nothing_is_gained(outcomes, network.config)


def _recipe(recipe: str | None, prompt_cache: Path | None) -> str:
    """Return the canonical recipe: the given one, that of the prompt cache, or the default."""
    from tersekv.recipe import Recipe

    given = None if recipe is None else str(Recipe.parse(recipe))
    if prompt_cache is None:
        return given or str(Recipe.parse(output.DEFAULT_RECIPE))
    from tersekv.cache.tensor_file import read_said

    said = read_said(prompt_cache.expanduser())[0]
    if "storage" in said:  # it loads into any
        return given or str(Recipe.parse(output.DEFAULT_RECIPE))
    found = str(Recipe.parse(said["recipe"]))
    if given not in (None, found):
        raise UserError(f"--recipe {given} differs from recipe {found} of {prompt_cache}: leave --recipe out")
    return found


def load(model: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Load a model and its tokenizer and warm the model up. A missing known model is downloaded
    first. dtype: type of the weights; `auto` keeps the checkpoint's."""
    from tersekv.cli import measure
    from tersekv.kernels import registry
    from tersekv.models import loading

    registry.chosen()  # raises if the variable is wrong
    with output.step(f"getting {model}"):
        loading.prepare(model, output.report)
    with output.step(f"loading {model}"):
        network, tokenizer = loading.load(model, dtype)
    with output.step("warming up"):
        measure.warm_up(network)
    return network, tokenizer


def read_text(prompt: str | None, file: Path | None, question: str | None) -> str:
    """Return the prompt from a command's options or standard input."""
    if prompt is not None and file is not None:
        raise UserError("--prompt and --file were both given: give one (a --question may follow either)")
    if prompt is not None:
        text = utf8(os.fsencode(prompt), "--prompt")
    elif file is not None and str(file) != "-":
        try:
            text = utf8(file.read_bytes(), str(file))
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}; give a text file with --file") from error
    elif file is None and sys.stdin.isatty():
        raise UserError("no prompt: give --prompt TEXT, --file FILE, or pipe a text in")
    else:
        text = utf8(sys.stdin.buffer.read(), "standard input")
    if not (text.strip() or question):
        raise UserError("the prompt is empty: give some text with --prompt, --file or on standard input")
    return f"{text}\n\n{question}" if question and text.strip() else question or text


def utf8(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text (byte {error.start}): convert it first") from error


def use_threads(threads: int | None) -> None:
    """Set the number of threads of torch and our kernels; None keeps it."""
    if threads is not None:
        most = 4 * (os.cpu_count() or 1)
        if threads > most:
            raise UserError(
                f"--threads {threads}: this machine has {os.cpu_count()} cores; at most {most} threads are allowed"
            )
        import torch

        torch.set_num_threads(threads)


def summary(outcomes: Sequence[Outcome], title: str, differs: dict[str, Any] | None) -> Any:
    """Return a table with one column per cache: bytes by part, bits, ratios, seconds, tokens per
    second, peak memory, and how answers differ (`measure.compared`)."""
    from tersekv.cache.footprint import PARTS

    def row(what: str, cells: Sequence[str]) -> tuple[str, ...]:
        return (what, *cells)

    held = [o.footprint for o in outcomes]
    parts = [p for p in ("exact", *PARTS) if any(p in h.parts for h in held)]
    names = {"exact": "unpacked keys and values"}
    rows = [row(names.get(p, p), [size(h.parts[p]) if p in h.parts else "-" for h in held]) for p in parts]
    rows += [
        row("cache, all parts", [size(h.total_bytes) for h in held]),
        row("tokens in the cache", [f"{h.tokens:,}" for h in held]),
        row("true bits per element", [f"{h.bits_per_element:.2f}" for h in held]),
        row("times smaller than bfloat16", [_ratio(h.ratio(16)) for h in held]),
        row("times smaller than fp8", [_ratio(h.ratio(8)) for h in held]),
        row("tokens from the prompt cache", [f"{o.cached_tokens:,}" for o in outcomes]),
        row("prefill seconds", [f"{o.prefill_seconds:.2f}" for o in outcomes]),
        row("decode tokens/s", [f"{o.decode_tokens_per_second:.2f}" for o in outcomes]),
        row("peak memory of prefill + cache", [size(o.peak_bytes) for o in outcomes]),
    ]
    notes = []
    if differs is not None:
        equal, found, name = differs["agreement"], differs["divergence"], sizes.short_name(outcomes[1].recipe)
        rows.append(
            row("equal new tokens at the start", ["-", Cell(f"{equal} of {len(outcomes[0].new_ids)}", {"{}": equal})])
        )
        rows.append(row("divergence, nats", ["-", f"{found['kl']:.4f}"]))
        notes = [f"{name}: {found['words']}, by the divergence of the answer's first {found['tokens']} tokens."]
        if equal < max(len(o.new_ids) for o in outcomes):
            notes.append("The answers part after one different token, because each goes on from its own text.")
    if any(o.cached_tokens for o in outcomes):
        notes.append("Peak memory counts only what was added after the prompt cache was loaded.")
    columns = ["full cache" if o.recipe == "full" else o.recipe for o in outcomes]
    return output.table(title, ("", *columns), rows, notes=notes, by_column="cache")


def _ratio(ratio: float) -> Cell:
    """Return a cell of a row "times smaller than …"."""
    larger = 0 < ratio < 0.995
    return Cell(f"{1 / ratio:.2f} times larger" if larger else f"{ratio:.2f}", {"{}": round(ratio, 2)})


def warn_of_loss(path: Path, kl: float | None, advice: str) -> None:
    """Warn if the storage file that a cache's tokens are from loses much.

    kl: its measured divergence in nats, if known. advice: end of the sentence.
    """
    from tersekv.lab.evals.tasks.divergence import in_words

    if kl is not None and kl > MOST_KL:
        log.warning(f"{path} loses much: KL divergence {kl:.3f} nats ({in_words(kl)}); {advice}")


def say_where_nothing_is_gained(outcomes: Sequence[Outcome], config: Any) -> None:
    """Print a line for each packed cache that is as large as in bfloat16 or larger."""
    from tersekv.cli.measure import FULL
    from tersekv.models.config import cache_shape

    for outcome in outcomes:
        if outcome.recipe != FULL:
            sentence = sizes.nothing_gained(outcome.footprint, cache_shape(config), outcome.recipe)
            if sentence:
                output.show(sentence)
