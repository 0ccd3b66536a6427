"""`tersekv demo`: ask a question about a long document, with the full cache and with a packed one.

The document is the language reference that ships with Python. The question asks for a fact hidden
in it. An answer ends with its first sentence, because small models continue with another subject.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tersekv.cli import output
from tersekv.cli.generate import load, say_where_nothing_is_gained, summary

if TYPE_CHECKING:
    from tersekv.cli.measure import Outcome

MAGIC = "7482153"
FACT = f"One of the special magic numbers for harbour is: {MAGIC}."
QUESTION = "What is the special magic number for harbour mentioned in the provided text?"
DEPTH = 0.5
"""Position of the hidden sentence, as a fraction of the document."""


def demo(
    recipe: Annotated[str, typer.Option("--recipe", "-r", help=output.RECIPE_HELP)] = output.DEFAULT_RECIPE,
    model: Annotated[str, typer.Option("--model", "-m", help=output.MODEL_HELP)] = "smollm2",
    tokens: Annotated[int, typer.Option(min=64, help="Approximate length of the document.")] = 6900,
    new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer in tokens.")] = 64,
    calibration: output.Calibrations = None,
    as_json: output.Json = False,
) -> None:
    """Ask about a long text with the full cache and with a packed one, and compare them."""
    with output.step("loading torch and transformers"):
        from tersekv.calibration import text as prompts
        from tersekv.calibration.find import calibration_for
        from tersekv.cli import measure
        from tersekv.lab.evals.tasks.divergence import AnswerDivergence
        from tersekv.recipe import Recipe
        from tersekv.serving.local.answers import Sampling

        parsed = str(Recipe.parse(recipe))
    network, tokenizer = load(model)
    with output.step("preparing"):
        learnt = calibration_for(network, parsed, calibration)
        document = hide(prompts.pydoc_document(tokenizer, tokens), FACT, DEPTH)
    prompt = prompts.question_prompt(tokenizer, document, QUESTION)
    ids = prompts.input_ids(tokenizer, prompt, network.config, new_tokens)
    sampling = Sampling(new_tokens, temperature=0, stop=(".",))
    if not as_json:
        output.show(
            f"{model} reads {ids.shape[1]:,} tokens of Python's language reference, in which one sentence is hidden:\n"
            f'  "{FACT}"\nand is asked:\n  "{QUESTION}"\n'
            "Both answers are greedy and end with their first sentence."
        )
    outcomes: list[Outcome] = []
    watch = AnswerDivergence()
    for choice in (None, parsed):
        if not as_json:
            what = "transformers' own cache (full)" if choice is None else f"tersekv's cache ({choice})"
            output.show(f"\nAnswer with {what}:")
        write = None if as_json else output.stream
        outcomes.append(measure.generate(network, tokenizer, ids, choice, sampling, write, learnt, None, watch))
    differs = measure.compared(watch, *outcomes)
    if as_json:
        full, packed = ({**o.document(), "found": MAGIC in o.answer} for o in outcomes)
        output.print_json({"full": full, "packed": packed, **differs})
        return
    output.show("")
    output.show(summary(outcomes, f"{ids.shape[1]:,} prompt tokens", differs))
    say_where_nothing_is_gained(outcomes, network.config)
    found = ["yes" if MAGIC in outcome.answer else "no" for outcome in outcomes]
    output.show(f"Hidden number found: {found[0]} with the full cache, {found[1]} with the packed one.")
    output.show(f"Peak memory is relative to the memory before each run, by {outcomes[0].peak_from}.")


def hide(document: str, fact: str, depth: float) -> str:
    """Insert `fact` as a paragraph of its own, after the paragraph at the fraction `depth` of the
    document."""
    at = document.find("\n\n", int(len(document) * depth))
    at = len(document) if at < 0 else at
    return f"{document[:at]}\n\n{fact}{document[at:]}"
