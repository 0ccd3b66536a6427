"""`tersekv eval`: score recipes and the full cache on the same tasks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tersekv.cli import output
from tersekv.cli.bare import Cell, size
from tersekv.cli.command import Command, made
from tersekv.cli.generate import load
from tersekv.cli.installation import run_header
from tersekv.errors import UserError

if TYPE_CHECKING:
    from tersekv.lab.evals import harness
    from tersekv.lab.evals.tasks import Task

TASKS_HELP = "Tasks: divergence, lines, longbench, needle, passkey, perplexity, ruler."
RECIPES_HELP = f"{output.RECIPE_HELP} May be repeated; bits=2..4 and bits=2,4 give several recipes."
QUARTERS_HELP = "For divergence: also show it by quarters of the windows, and the negative log-likelihood."
ACROSS_HELP = "One column per recipe and one row per figure, as in the README."
OUT_HELP = "Output folder for records.jsonl. Evaluations that it already has are not repeated."


class WithTaskOptions(Command):
    """A command that also has one option per field of any task. Tasks are imported only when it is
    used."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's own parameters and the tasks' options."""
        own = super().get_params(ctx)
        taken = {param.name for param in own}
        return [*own[:-1], *(param for param in _task_params() if param.name not in taken), own[-1]]

    def invoke(self, ctx: Any) -> Any:
        """Call the command; the given options of tasks are in `ctx.obj`."""
        taken = {param.name: ctx.params.pop(param.name) for param in _task_params() if param.name in ctx.params}
        ctx.obj = {name: text for name, text in taken.items() if text is not None}
        return super().invoke(ctx)


@functools.lru_cache(maxsize=1)
def _task_params() -> list[Any]:
    """Return typer's parameters for one text option per field of any task."""
    from tersekv.lab.evals.options import all_options

    options = {}
    for option, (defaults, said) in all_options().items():
        same = len(set(defaults.values())) == 1
        value = next(iter(defaults.values())) if same else ", ".join(f"{t}: {d}" for t, d in defaults.items())
        help_text = f"{said} For {', '.join(defaults)}; default {value or 'none'}."
        options[option] = Annotated[
            str | None, typer.Option(f"--{option.replace('_', '-')}", help=help_text, metavar="VALUE")
        ]
    return made(options)


def evaluate(
    ctx: typer.Context,
    tasks: Annotated[list[str], typer.Argument(help=TASKS_HELP, metavar="TASK...")],
    recipe: Annotated[list[str] | None, typer.Option("--recipe", "-r", help=RECIPES_HELP)] = None,
    model: Annotated[str, typer.Option("--model", "-m", help=output.MODEL_HELP)] = "smollm2",
    out: Annotated[Path | None, typer.Option("--out", "-o", help=OUT_HELP)] = None,
    calibration: output.Calibrations = None,
    quarters: Annotated[bool, typer.Option("--quarters", help=QUARTERS_HELP)] = False,
    across: Annotated[bool, typer.Option("--across", help=ACROSS_HELP)] = False,
    as_json: output.Json = False,
) -> None:
    """Score the full cache and packed caches on the same samples of one or more tasks.

    With --out, a run that was stopped continues where it was.
    """
    with output.step("loading torch and transformers"):
        from tersekv.lab.evals.options import build
        from tersekv.lab.evals.products import expand, unique

        chosen = build(tasks, ctx.obj or {})
        recipes = unique(one for text in recipe or [] for one in ([text] if text == "full" else expand(text)))
    if out is not None and out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file: give a folder")
    _check_files(chosen)
    summaries = _run(chosen, recipes, model, out, calibration)
    if as_json:
        output.print_json({"model": model, "results": [summary.document() for summary in summaries]})
        return
    from tersekv.lab.evals.names import names_as_asked

    names = names_as_asked([summary.recipe for summary in summaries], recipe or [])
    for name, task in chosen.items():
        ours = [summary for summary in summaries if summary.task == name]
        output.show(_table(name, task, ours, names, quarters, across))


def _check_files(chosen: dict[str, Task]) -> None:
    """Raise UserError if a text or a folder of the tasks' options cannot be read, before the model is loaded."""
    from tersekv.lab.evals.longbench_data import HUB
    from tersekv.lab.evals.windows import BUILT_IN, read_text

    for task in chosen.values():
        text, data = (getattr(task, name, "") for name in ("text", "data"))
        if text not in ("", BUILT_IN):
            read_text(text)
        if data not in ("", HUB) and not Path(data).is_dir():
            raise UserError(f"--data {data} is not a folder: give one with the task's files")


def _run(
    chosen: dict[str, Task], recipes: Sequence[str], model: str, out: Path | None, calibration: Path | None
) -> list[harness.Summary]:
    network, tokenizer = load(model)
    from tersekv.lab.evals.harness import Harness
    from tersekv.lab.evals.records import Records

    about = run_header() if out else None
    with Records(out, about) as records, output.step("making samples", unit="evaluations") as step:
        run = Harness(network, tokenizer, model, recipes, calibration)
        try:
            return run.run(
                chosen, records, lambda at: step.at(at.done, at.total, f"{at.task} {at.sample} with {at.recipe}")
            )
        except KeyboardInterrupt:
            kept = f"{records.path} keeps the finished part: the same command continues from there"
            output.report(f"stopped; {kept if records.path else 'nothing was kept, because no --out folder was given'}")
            raise


def _table(
    name: str, task: Task, summaries: Sequence[harness.Summary], names: dict[str, str], quarters: bool,
    across: bool = False,
) -> output.Tables:  # fmt: skip
    """Return a table with one row per recipe, or with `across` one column. Each metric has its
    standard error. Notes below explain short names."""
    from tersekv.lab.evals.tasks.divergence import in_words

    metrics = [metric for metric in (summaries[0].metrics if summaries else ()) if quarters or metric not in task.more]
    described = [
        in_words(s.metrics["kl"].mean, s.metrics["top1_agreement"].mean)
        if "kl" in s.metrics and s.recipe != "full"
        else "-"
        for s in summaries
    ]
    said = ("in words",) if "kl" in metrics else ()
    columns = (
        "recipe",
        "samples",
        "bits",
        "bytes",
        *(metric.replace("_", " ") for metric in metrics),
        "seconds",
        *said,
    )
    rows = [
        (
            *(names[s.recipe], s.samples, f"{s.bits_per_element:.2f}", size(s.bytes, "{}")),
            *(_estimate(*s.metrics[metric]) for metric in metrics),
            f"{s.seconds:.1f}",
            *((words,) if said else ()),
        )
        for s, words in zip(summaries, described, strict=True)
    ]
    notes = [f"{names[s.recipe]} = {s.recipe}" for s in summaries if names[s.recipe] != s.recipe]
    title = f"{name}: {task.about()}"
    if not across:
        return output.table(title, columns, rows, notes=notes, words=said)
    first, *others = zip(columns, *rows, strict=True)
    return output.table(title, ("", *first[1:]), others, notes=notes, words=said, by_column=str(first[0]))


def _estimate(mean: float, stderr: float) -> Cell:
    known = stderr == stderr
    return Cell(
        f"{mean:.4g}" + (f" ± {stderr:.2g}" if known else ""),
        {"{}": mean} | ({"{}, standard error": stderr} if known else {}),
    )
