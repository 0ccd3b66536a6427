"""Commands of the program: the option `--format`, and examples at the end of every help."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from tersekv.cli import examples, output
from tersekv.errors import UserError

FORMAT_HELP = "Form of tables. With csv, everything but tables goes to stderr. json is --json."


class Command(TyperCommand):
    """A command that has `--format` if it has `--json`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's own parameters, with `--format` before `--json`."""
        own = super().get_params(ctx)
        at = next((i for i, param in enumerate(own) if param.name == "as_json"), None)
        return own if at is None else [*own[:at], *made({"form": _FORM}), *own[at:]]

    def invoke(self, ctx: Any) -> Any:
        """Call the command; its tables have the form that was asked for."""
        form = ctx.params.pop("form", None)
        if ctx.params.get("as_json") and form not in (None, "json"):
            raise UserError(f"--json and --format {form} were both given: give one")
        if form == "json":
            ctx.params["as_json"] = True
        elif form is not None:
            output.use_form(form)
        return super().invoke(ctx)


_FORM = Annotated[output.Form | None, typer.Option("--format", help=FORMAT_HELP, show_default="text")]


def made(options: dict[str, Any]) -> list[Any]:
    """Return typer's parameters for annotated types by name."""

    def command(**_: str) -> None: ...

    kinds = dict.fromkeys(options, inspect.Parameter.KEYWORD_ONLY)
    parameters = [inspect.Parameter(name, kinds[name], default=None, annotation=one) for name, one in options.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = dict(options)
    app = typer.Typer(add_completion=False)
    app.command(add_help_option=False)(command)
    return list(typer.main.get_command(app).params)


def prepare(app: typer.Typer, path: str = "") -> None:
    """Give every command of a program `--format`, and to every help its examples."""
    app.info.epilog = examples.of(path)
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "")
        command.cls = Command if command.cls in (None, TyperCommand) else command.cls
        command.epilog = examples.of(f"{path} {name}".strip())
    for group in app.registered_groups:
        if group.typer_instance is not None:
            prepare(group.typer_instance, f"{path} {group.name}".strip())
