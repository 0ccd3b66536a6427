"""Requests per second and latencies of vLLM's server under memory pressure, with and without a recipe.

    python benchmarks/serving_load.py run --recipe full --out FILE            # and --recipe turboquant:bits=4
    python benchmarks/serving_load.py table FILE --into docs/serving.md

The cache has the bytes of `--native-pages` pages of vLLM's own cache, whatever the recipe. A client sends
requests of random ids to the server at the loopback address, at most `--at-once` at a time, and streams
the answers. Every fourth request has the prompt of an earlier one; `--cancel` streams are closed early.

With `--turns 4` each request is a conversation about a text of its own instead: its prompt is followed by a
question of 32 ids, and every turn sends what was said before. The prefix cache then saves what the cache holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from serving import FULL, write_between

BEGIN, END = "<!-- load: made by benchmarks/serving_load.py -->", "<!-- end of load -->"
NATIVE_TOKENS_IN_1_GIB = 46_592
"""SmolLM2 in bfloat16, from vLLM's line `CPU KV cache size`."""
PAGE = 128
STARTING_SECONDS = 300
QUESTION = 32
"""Ids of the question of each turn."""


@contextlib.contextmanager
def server(
    model: str,
    recipe: str,
    calibration: str | None,
    blocks: int,
    threads: int,
    options: Sequence[str] = ("--dtype", "bfloat16"),
    more: Mapping[str, str] | None = None,
    longest: int = 1024,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start a server with processes of its own group; yield its address and its first process.

    blocks: pages of the cache, 0 for those of 1 GiB. options: of vLLM. more: options of the recipe's section.
    longest: tokens of the longest sequence.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    section = {"recipe": recipe} | ({"calibration": calibration} if calibration and "trellis" in recipe else {})
    section |= dict(more or {})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--enforce-eager", *options]
    command += ["--max-model-len", str(max(1024, longest)), "--max-num-seqs", "64"]
    command += ["--num-gpu-blocks-override", str(blocks)] if blocks else []
    command += [] if recipe == FULL else ["--additional-config", json.dumps({"tersekv": section})]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(threads)}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = Path(f"{os.environ.get('TMPDIR', '/tmp')}/serving-load-{port}.log")
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        try:
            started = time.monotonic()
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
                if process.poll() is not None or time.monotonic() - started > STARTING_SECONDS:
                    raise SystemExit(f"the server did not start; see {log}")
                time.sleep(1)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()
            process.wait(timeout=60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever its processes left


async def stream(session: Any, address: str, ids: list[int], new: int) -> AsyncIterator[list[int]]:
    """Yield the new tokens of a request as they arrive."""
    body = {
        "model": "m", "prompt": ids, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    async with session.post(f"{address}/v1/completions", json=body) as answer:
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0].get("token_ids") or []


async def load(address: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests. Return the answers by request, latencies and the time of all."""
    import aiohttp

    draw, slots = random.Random(0), asyncio.Semaphore(args.at_once)
    fresh = [[draw.randrange(1000, 40000) for _ in range(args.prompt)] for _ in range(args.requests)]
    prompts = [fresh[i] if i % 4 != 3 else fresh[i - 3] for i in range(args.requests)]
    cancelled = set(draw.sample(range(args.requests), args.cancel))
    if args.turns:
        prompts = fresh
    questions = [[[draw.randrange(1000, 40000) for _ in range(QUESTION)] for _ in range(args.turns)] for _ in prompts]
    found: list[list[dict[str, Any]]] = [[] for _ in prompts]

    async def one(session: Any, i: int) -> None:
        said = prompts[i]
        for turn in range(max(1, args.turns)):
            if args.turns:
                said = said + questions[i][turn]
            async with slots:
                started, times, tokens = time.perf_counter(), [], []
                async for new in stream(session, address, said, args.new):
                    times.append(time.perf_counter() - started)
                    tokens += new
                    if i in cancelled and len(tokens) >= 3:
                        return
            each = (times[-1] - times[0]) / max(1, len(tokens) - 1)
            found[i].append({"tokens": tokens, "first": times[0], "each": each})
            said = said + tokens

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        started = time.perf_counter()
        await asyncio.gather(*(one(session, i) for i in range(args.requests)))
        spent = time.perf_counter() - started
    done = [answer for answers in found for answer in answers]
    again = [] if args.turns else [i for i in range(3, len(found), 4) if found[i] and found[i - 3]]
    same = [found[i][0]["tokens"] == found[i - 3][0]["tokens"] for i in again]
    return {
        "seconds": spent, "done": len(done), "whole": sum(len(one["tokens"]) == args.new for one in done),
        "repeated": len(same), "repeated_same": sum(same), "first": sorted(one["first"] for one in done),
        "each": sorted(one["each"] for one in done),
    }  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Measure one recipe and append a record."""
    from tersekv.models.loading import prepare

    model, blocks = prepare(args.model), args.native_pages
    if args.recipe != FULL:
        whole = NATIVE_TOKENS_IN_1_GIB // PAGE
        blocks = int(args.native_pages * args.tokens_in_1_gib / PAGE / whole)
    longest = args.prompt + max(1, args.turns) * (QUESTION + args.new)
    with server(model, args.recipe, args.calibration, blocks, args.threads, longest=longest) as (address, _):
        measured = asyncio.run(load(address, args))
        with urllib.request.urlopen(f"{address}/metrics") as answer:
            said = re.findall(r"^vllm:num_preemptions_total\S* (\S+)", answer.read().decode(), re.MULTILINE)
    record = {
        "recipe": args.recipe, "pages": blocks, "native_pages": args.native_pages, "requests": args.requests,
        "at_once": args.at_once, "prompt": args.prompt, "new": args.new, "cancelled": args.cancel,
        "turns": args.turns, "threads": args.threads, "preemptions": sum(map(float, said)), **measured,
    }  # fmt: skip
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print("\n".join(rows([record])))


def rows(records: list[dict[str, Any]]) -> list[str]:
    """Return the table of records."""
    lines = [
        "| load | cache | requests/s | preemptions | first token s, p50/p95 | next token ms, p50/p95 | whole |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for r in records:
        first, each = ([statistics.quantiles(r[name], n=20)[i] for i in (9, 18)] for name in ("first", "each"))
        what = f"{r['requests']} x {r['prompt']:,} + {r['new']}"
        what += f", {r['turns']} turns" if r.get("turns") else ""
        cells = [what, f"`{r['recipe']}`", f"{r['done'] / r['seconds']:.2f}", f"{r['preemptions']:.0f}"]
        cells += [f"{first[0]:.1f} / {first[1]:.1f}", f"{1e3 * each[0]:.0f} / {1e3 * each[1]:.0f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {r['whole']} of {r['done']} |")
    return lines


def table(args: argparse.Namespace) -> None:
    """Print the table, or write it between its markers."""
    records = [json.loads(line) for path in args.records for line in path.read_text().splitlines()]
    write_between(args.into, BEGIN, END, rows(records))


def main() -> None:
    """Parse the options and run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    go = commands.add_parser("run", help="measure one recipe and append a record")
    go.add_argument("--recipe", required=True, help=f"a recipe, or {FULL!r}")
    go.add_argument("--calibration", help="calibration file of recipes with trellis")
    go.add_argument("--tokens-in-1-gib", type=int, default=175_360, help="capacity that vLLM prints with the recipe")
    go.add_argument("--native-pages", type=int, default=32, help="bytes of the cache in pages without a recipe")
    for name, value in (
        ("requests", 64),
        ("at-once", 32),
        ("prompt", 400),
        ("new", 128),
        ("cancel", 0),
        ("turns", 0),
        ("threads", 3),
    ):
        go.add_argument(f"--{name}", type=int, default=value)
    go.add_argument("--model", default="smollm2")
    go.add_argument("--out", type=Path, required=True)
    go.set_defaults(run=run)
    show = commands.add_parser("table", help="print or write the table of records")
    show.add_argument("records", type=Path, nargs="+")
    show.add_argument("--into", type=Path)
    show.set_defaults(run=table)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
