"""`tersekv plot`: draw a figure from a model's keys or from records, and print its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tersekv.cli import output
from tersekv.cli.bare import bare
from tersekv.cli.files import check_out, write_whole
from tersekv.cli.generate import load
from tersekv.errors import UserError, hint
from tersekv.lab.plots import kinds
from tersekv.units import parse_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tersekv.lab.plots.base import ModelKeys, Plot

KIND_HELP = f"Kind of figure: {', '.join(kinds.names())}."
RECORDS_HELP = "Folder or file from `tersekv eval --out`, or the records of a benchmark."
TEXT_HELP = "Text file, or pydoc (Python's language reference), which is the default."
QUESTIONS_HELP = (
    "JSON Lines of questions with question_id and turns, as MT-Bench's. In place of a text, draw one question and the "
    "model's answer."
)
SUFFIXES = ("png", "svg", "pdf")
MODEL, TEXT, TOKENS, PREDICTED_TOKENS = "smollm2", "pydoc", 1024, 32768

# Options of the command, by the data that a kind of figure reads. Kinds add options of their own
# (metric, task).
TAKES = {
    "keys": {"model", "text", "tokens", "questions", "question", "max-new-tokens", "layers", "head"},
    "activations": {"model", "text", "tokens", "layers", "head"},
    "evaluation": {"records"},
    "timings": {"records"},
    "decodings": {"records"},
    "streams": {"records"},
    "bytes": {"records", "task", "model", "recipe", "tokens"},
}


def plot(
    kind: Annotated[str, typer.Argument(help=KIND_HELP, metavar="KIND")],
    records: Annotated[list[Path] | None, typer.Argument(help=RECORDS_HELP, metavar="[RECORDS]...")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Output .png, .svg or .pdf; default KIND.png.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help=f"{output.MODEL_HELP} By default {MODEL}.")] = None,
    text: Annotated[str | None, typer.Option("--text", help=TEXT_HELP)] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Tokens, for example 2k. Default 1k; 32k for memory.")
    ] = None,
    questions: Annotated[str | None, typer.Option("--questions", help=QUESTIONS_HELP)] = None,
    question: Annotated[
        str | None, typer.Option("--question", help="question_id of the question. Default the first.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Maximum tokens of the answer. Default 256.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", help="Layers, for example 0,15,-1. Default first, middle and last.")
    ] = None,
    head: Annotated[int | None, typer.Option("--head", min=0, help="KV head; default all.")] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="For example perplexity_ratio, kl or accuracy.")
    ] = None,
    task: Annotated[str | None, typer.Option("--task", help="Use only the records of this task.")] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", help="For memory: predict these recipes instead of reading records."),
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Draw a figure from a model's keys, or from records of evaluations and benchmarks."""
    given: dict[str, Any] = {
        name: value for name, value in {
            "records": records, "model": model, "text": text, "tokens": tokens, "layers": layers, "head": head,
            "questions": questions, "question": question, "max-new-tokens": max_new_tokens, "metric": metric,
            "task": task, "recipe": recipe,
        }.items() if value not in (None, [])
    }  # fmt: skip
    if kind not in kinds.names():
        raise UserError(
            f"{kind!r} is not a valid kind of figure{hint(kind, kinds.names())} (known: {', '.join(kinds.names())})"
        )
    path = check_out(out or Path(f"{kind}.png"), SUFFIXES)
    with output.step("loading torch and matplotlib"):
        chosen = kinds.plot(kind)
        from tersekv.lab.plots.style import render, to_bytes

    _refuse_others(kind, chosen, given)
    source = _source(chosen, given)
    with output.step(f"drawing {kind}"):
        picture = render(chosen, source, **{name: given[name] for name in chosen.options if name in given})
        write_whole(path, to_bytes(picture, path.suffix.lower().removeprefix(".")))
    tables = [output.table(made.title, made.columns, made.rows, left=made.left) for made in picture.tables]
    if as_json:
        documents = [
            {"title": made.title, **dict(zip(("columns", "rows"), bare(made), strict=True))} for made in tables
        ]
        output.print_json({"plot": kind, "out": str(path), "shows": picture.alt, "tables": documents})
        return
    for made in tables:
        output.show(made)
    output.show(f"{kind}: {path}")


def _refuse_others(kind: str, chosen: Plot, given: dict[str, Any]) -> None:
    """Raise UserError if an option was given that this kind of figure does not use."""
    takes = TAKES[chosen.reads] | set(chosen.options)
    wrong = sorted(set(given) - takes)
    if wrong == ["records"]:
        raise UserError(f"plot {kind} reads a model, not records ({given['records'][0]}): leave them out")
    if wrong:
        options = ", ".join(f"--{name}" for name in sorted(takes - {"records"})) or "no options but --out"
        raise UserError(f"plot {kind} has no --{wrong[0]}; it takes {options}")


def _source(chosen: Plot, given: dict[str, Any]) -> Any:
    """Read the data for a kind of figure."""
    records = given.get("records", [])
    if chosen.reads in ("keys", "activations"):
        return model_keys(given, before_rope=chosen.reads == "activations")
    if chosen.reads == "timings":
        from tersekv.lab.plots.timings import read_timings

        return read_timings(records)
    if chosen.reads == "decodings":
        from tersekv.lab.plots.decodings import read_decodings

        return read_decodings(records)
    if chosen.reads == "streams":
        from tersekv.lab.plots.streams import read_streams

        return read_streams(records)
    from tersekv.lab.plots import groups, held

    if chosen.reads == "bytes" and "recipe" in given:
        return _predicted(given)
    if chosen.reads == "bytes":
        if extra := sorted({"model", "tokens"} & set(given)):
            raise UserError(f"--{extra[0]} is only used for a prediction: give --recipe instead of records")
        return held.held_at_longest(held.longest(groups.grouped(groups.read_records(records), given.get("task"))))
    return groups.read_records(records)


def _predicted(given: dict[str, Any]) -> Any:
    from tersekv.hf.facts import load_shape
    from tersekv.lab.evals.products import expand, unique
    from tersekv.lab.plots.held import predicted

    if extra := sorted({"records", "task"} & set(given)):
        raise UserError(f"both --recipe (a prediction) and {extra[0]} were given: give one of them")
    recipes = unique(one for text in given["recipe"] for one in expand(text))
    model = given.get("model", MODEL)
    return predicted(load_shape(model, with_weights=False)[0], model, recipes, _tokens(given, PREDICTED_TOKENS))


def _tokens(given: dict[str, Any], default: int) -> int:
    return parse_tokens(given["tokens"], "--tokens") if "tokens" in given else default


def model_keys(given: dict[str, Any], before_rope: bool = False) -> ModelKeys:
    """Return a model's keys and values for the first tokens of a text, or for a question and its
    answer, and the keys before RoPE if wanted.

    Raises:
        UserError: an option does not fit the model, or its RoPE cannot be removed from keys.
    """
    name = given.get("model", MODEL)
    from tersekv.calibration.capture import capture, keys_before_rope
    from tersekv.cli import measure
    from tersekv.lab.plots.base import ModelKeys

    source, read = _question(given) if "questions" in given else _text(given)
    network, tokenizer = load(name)
    ids = read(network, tokenizer)
    with measure.prefill_progress(network, f"reading {ids.shape[1]:,} tokens"):
        captured = capture(network, ids)
        keys, values = ([layer[side][0].float().cpu() for layer in captured] for side in (0, 1))
    if not keys:
        raise UserError(f"{name} has no layers with keys")
    heads = keys[0].shape[0]
    if given.get("head", 0) >= heads:
        raise UserError(f"--head {given['head']}: the model has {heads} KV heads, 0 to {heads - 1}")
    before = keys_before_rope(network.config, keys) if before_rope else ()
    return ModelKeys(name, source, keys, _layers(given.get("layers"), len(keys)), given.get("head"), values, before)


def _text(given: dict[str, Any]) -> tuple[str, Callable[..., Tensor]]:
    """Return the name of a text, and a function of model and tokenizer that returns its first ids
    [1, T]."""
    if extra := sorted({"question", "max-new-tokens"} & set(given)):
        raise UserError(f"--{extra[0]} is only used with --questions: give a file of questions")
    text, tokens = given.get("text", TEXT), _tokens(given, TOKENS)
    from tersekv.lab.evals.windows import read_text
    from tersekv.models.config import longest_context

    words = read_text(text)

    def read(network: Any, tokenizer: Any) -> Tensor:
        context = longest_context(network.config)
        if context and tokens > context:
            raise UserError(f"--tokens {tokens:,} is more than this model's context of {context:,}: give fewer")
        ids: Tensor = tokenizer(words, return_tensors="pt", verbose=False)["input_ids"][:, :tokens]
        if ids.shape[1] < tokens:
            raise UserError(
                f"text {text!r} has {ids.shape[1]:,} tokens, --tokens is {tokens:,}: give fewer or a longer text"
            )
        return ids

    return text, read


def _question(given: dict[str, Any]) -> tuple[str, Callable[..., Tensor]]:
    """Return the name of a question, and a function of model and tokenizer that returns the ids
    [1, T] of question and answer."""
    if extra := sorted({"text", "tokens"} & set(given)):
        raise UserError(f"both --questions and --{extra[0]} were given: give one of them")
    from tersekv.lab.evals.questions import MAX_NEW_TOKENS, answered, choose, read_questions

    path = given["questions"]
    questions = read_questions(path)
    id = choose(questions, given.get("question"), path)

    def read(network: Any, tokenizer: Any) -> Tensor:
        with output.step("answering the question"):
            return answered(network, tokenizer, questions[id], given.get("max-new-tokens", MAX_NEW_TOKENS))

    return f"{path} {id} with its answer", read


def _layers(text: str | None, count: int) -> list[int]:
    """Parse --layers; negative numbers count from the last layer. By default use the first, middle
    and last layer."""
    if text is None:
        return sorted({0, count // 2, count - 1})
    try:
        asked = [int(part) for part in text.split(",")]
    except ValueError:
        asked = [count]
    if not all(-count <= layer < count for layer in asked):
        raise UserError(
            f"--layers {text!r}: write layers from 0 to {count - 1} (or -1 for the last), separated by commas"
        )
    return list(dict.fromkeys(layer % count for layer in asked))
