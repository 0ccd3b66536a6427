"""`tersekv choose`: one recipe for a model, with the reason, and tried on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tersekv.cli import estimate, output, sizes
from tersekv.cli.bare import Cell
from tersekv.cli.generate import load, utf8
from tersekv.errors import UserError
from tersekv.units import parse_bytes, parse_tokens

PREFIX, READ, LEAST_PREFIX = 2048, 256, 256
"""Tokens of the text that are packed and then read, and the fewest that are packed."""

MEMORY_HELP = "Memory for weights and cache, for example 24GB."
TRY_HELP = "Text file to try the recipe and its neighbours on: up to 2,048 tokens are packed, and 256 read after them."


def choose(
    model: Annotated[str, typer.Option("--model", "-m", help=estimate.MODEL_HELP)] = estimate.DEFAULT_MODEL,
    memory: Annotated[str | None, typer.Option("--memory", help=MEMORY_HELP)] = None,
    context: Annotated[
        str | None,
        typer.Option("--context", "-c", help="Tokens, for example 32k.", show_default="32k, or the model's longest"),
    ] = None,
    text: Annotated[Path | None, typer.Option("--try", help=TRY_HELP)] = None,
    as_json: output.Json = False,
) -> None:
    """Choose a recipe for a model, and say why.

    It is chosen from the model's config alone.
    With --try the model also reads a text of yours.
    """
    if text is not None:
        if not text.is_file():
            raise UserError(f"--try {text} is not a file: give a text file")
        utf8(text.read_bytes(), f"--try {text}")  # before the model is loaded
    tokens = None if context is None else parse_tokens(context, "--context")
    if memory is not None:
        parse_bytes(memory, "--memory")
    with output.step("loading torch and transformers"):
        from tersekv.hf.choice import choose as chosen
        from tersekv.recipe import Recipe

        found = chosen(model, memory, tokens)
    quick = [other for other in found.others if not Recipe.parse(other).policy().allots]  # others are measured first
    tried = [] if text is None else try_on(model, text, [found.recipe, *quick])
    if as_json:
        document = found._asdict()
        document["peak_bytes"], document["peak_bytes_in_chunks"] = document.pop("peak")
        output.print_json({"model": model, **document, "tried": tried})
        return
    size = f"{output.human_bytes(found.bytes)} at {found.tokens:,} tokens"
    output.show(f"recipe  {found.recipe}")
    output.show(f"why     {found.why}")
    output.show(f"cache   {size}, {sizes.against_bfloat16(found.bytes, found.bytes_bf16)}")
    whole, chunks = found.peak
    if whole is not None and chunks is not None:
        output.show(f"peak    {sizes.peak(whole, chunks, memory)}")
    output.show(f"others  {', '.join(found.others) or 'none'}")
    if tried:
        columns = ("recipe", "bits", "divergence", "same next token", "in words")
        rows = [
            (
                sizes.short_name(one["recipe"]),
                f"{one['bits']:.2f}",
                Cell(f"{one['kl']:.4f}", {"{} (nats)": one["kl"]}),
                Cell(f"{one['same']:.1%}", {"{} (share)": one["same"]}),
                one["words"],
            )
            for one in tried
        ]
        title = f"{Path(model).name} on {text}: {READ} tokens"
        output.show(output.table(title, columns, rows, words=("in words",)))


def try_on(model: str, text: Path, recipes: list[str]) -> list[dict[str, Any]]:
    """Return the divergence of recipes on a text, with words about it."""
    network, tokenizer = load(model)
    from tersekv.lab.evals.harness import Harness
    from tersekv.lab.evals.tasks.divergence import Divergence, in_words
    from tersekv.models.config import longest_context

    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    longest = longest_context(network.config) or PREFIX + READ
    if longest < LEAST_PREFIX + READ:
        raise UserError(f"--try needs a context of {LEAST_PREFIX + READ} tokens, and this model's is {longest}")
    prefix = min(PREFIX, len(ids) - READ, longest - READ)
    if prefix < LEAST_PREFIX:
        raise UserError(f"--try {text} has {len(ids):,} tokens: give a text of {LEAST_PREFIX + READ} or more")
    task = Divergence(text=str(text), context=prefix + READ, prefix=prefix, windows=1, mode="cache")
    with output.step("reading the text", unit="evaluations") as step:
        summaries = Harness(network, tokenizer, model, recipes).run(
            {"divergence": task}, progress=lambda at: step.at(at.done, at.total, f"reading with {at.recipe}")
        )
    return [
        {
            "recipe": one.recipe,
            "bits": one.bits_per_element,
            "kl": one.metrics["kl"].mean,
            "same": one.metrics["top1_agreement"].mean,
            "words": in_words(one.metrics["kl"].mean, one.metrics["top1_agreement"].mean),
        }
        for one in summaries[1:]
    ]
