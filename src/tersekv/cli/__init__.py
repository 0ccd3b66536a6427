"""The program `tersekv`, with one file per command. Commands import torch and transformers when
they run, so that help is fast."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tersekv import __version__, steps
from tersekv.cli import (
    bench,
    calibrate,
    chat,
    choose,
    command,
    demo,
    doctor,
    estimate,
    evaluate,
    generate,
    listing,
    log,
    models,
    output,
    plot,
    prompt_cache,
    report,
    serve,
    streams,
)
from tersekv.errors import CacheError, UserError

app = typer.Typer(
    name="tersekv",
    help="Compress key-value caches of language models to 2-5 bits, and attend to the packed bytes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command("eval", cls=evaluate.WithTaskOptions)(evaluate.evaluate)
app.command()(calibrate.calibrate)
app.command(context_settings={"allow_extra_args": True})(serve.serve)
app.command()(choose.choose)
app.command("list")(listing.list_methods)
app.command()(estimate.estimate)
app.add_typer(models.app, name="models")
app.add_typer(prompt_cache.app, name="prompt-cache")
app.command()(doctor.doctor)
app.command()(demo.demo)
app.command()(plot.plot)
app.command()(report.report)
app.add_typer(bench.app, name="bench")
command.prepare(app)

# Base class of the parser's errors. It has no stable import path: some versions of typer import
# click, others bundle it.
_PARSER_ERROR: Any = typer.BadParameter.__mro__[2]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tersekv {__version__}")
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]
_Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr what is loaded, fitted and packed.")]


@app.callback()
def _options(version: _Version = False, verbose: _Verbose = False) -> None:
    if verbose:
        log.verbose()


def main() -> None:
    """Run the program. User errors print one line on stderr and give exit status 2."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status."""
    streams.prepare()
    output.begin()
    with log.shown(), steps.shown_by(output.steps_at):
        return _run(arguments)


def _run(arguments: list[str]) -> int:
    try:
        status = app(arguments, prog_name="tersekv", standalone_mode=False)
        sys.stdout.flush()
    except (UserError, CacheError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return 130
    except typer.Abort:
        return 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            return _refuse(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
        streams.abandon()
        return 1
    except _PARSER_ERROR as error:
        message = _explained(error, arguments)
        return (
            _refuse(f"{message.rstrip('.')}; `tersekv {_command(arguments)}--help` shows what is allowed.")
            if message
            else 2
        )
    return status if isinstance(status, int) else 0


def _explained(error: Any, arguments: list[str]) -> str:
    """Return a message of the parser, with the value that came if it is one of an option."""
    message = str(error.format_message())
    _, found, allowed = message.partition(": Input should be ")
    if not found:
        return message
    for option in error.param.opts:
        for given, value in zip(arguments, [*arguments[1:], ""], strict=True):
            if given == option or given.startswith(f"{option}="):
                came = value if given == option else given.partition("=")[2]
                return f"{came!r} is not a valid {max(error.param.opts, key=len)}: it must be {allowed}"
    return message


def _command(arguments: list[str]) -> str:
    """Return the names of the command and of its subcommand, as far as they exist, with a space after each."""
    found, program = "", app
    for name in arguments:
        groups = {group.name: group.typer_instance for group in program.registered_groups}
        commands = {one.name or getattr(one.callback, "__name__", "") for one in program.registered_commands}
        if name not in commands | groups.keys():
            break
        found += f"{name} "
        if (inner := groups.get(name)) is None:
            break
        program = inner
    return found


def _refuse(message: str) -> int:
    print(f"tersekv: {' '.join(message.split())}", file=sys.stderr)
    return 2
