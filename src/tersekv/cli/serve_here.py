"""Serve a model in this process: `tersekv serve` without vLLM."""

from __future__ import annotations

import socket
from pathlib import Path

from tersekv import extras
from tersekv.cli import output
from tersekv.cli.generate import load, use_threads
from tersekv.errors import UserError


def serve_here(
    model: str,
    recipe: str,
    calibration: Path | None,
    address: tuple[str, int],
    cache_gib: int,
    max_new_tokens: int,
    dtype: str,
    threads: int | None,
    prefill_chunk: int | None,
) -> None:
    """Load a model and serve it until Ctrl-C. cache_gib: packed bytes of earlier prompts that are kept.

    Raises:
        UserError: a package or the model is missing, or the address is in use.
    """
    for package in extras.SERVE:
        extras.require("tersekv serve", package)
    listening = _listen(address)
    with output.step("loading torch and transformers"):
        import tersekv
        from tersekv.calibration.find import calibration_for
        from tersekv.recipe import Recipe
        from tersekv.serving.local.app import Server, Web
        from tersekv.serving.local.engine import Engine

        use_threads(threads)
        parsed = Recipe.parse(recipe)
    network, tokenizer = load(model, dtype)
    with output.step("looking for the calibration"):
        learnt = calibration_for(network, parsed, calibration)
    template = tersekv.CompressedCache(network.config, parsed, learnt)
    server = Server(model, Engine(network, tokenizer, template, cache_gib << 30, prefill_chunk), max_new_tokens)
    listening.listen()  # before the line, so that clients who wait for it can connect
    host, port = listening.getsockname()[:2]
    output.report(f"{model} with {parsed.name} at http://{host}:{port}/v1, one answer at a time; Ctrl-C ends it")
    try:
        Web(server).run(sockets=[listening])
    except KeyboardInterrupt:
        output.report("the server has ended")
        raise


def _listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket bound to an address, before the minutes of loading a model."""
    host, port = address
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
    except (OSError, UnicodeError) as error:  # UnicodeError: the name cannot be one of a host
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen at {host}:{port}: {why}; give another --host or --port") from error
    return listening
