"""vLLM's server: requests per second under memory pressure, and a thousand requests without a lost token.

`serving.py load`: the cache has the bytes of `--native-pages` pages of vLLM's own cache, whatever the
recipe. A client sends requests of random ids to the server at the loopback address, at most
`--at-once` at a time, and streams the answers. Every fourth request has the prompt of an earlier one;
`--cancel` streams are closed early. With `--turns 4` each request is a conversation about a text of its
own instead: its prompt is followed by a question of 32 ids, and every turn sends what was said before.
The prefix cache then saves what the cache holds.

`serving.py robust`: no token may be lost or garbled, also after kill -9 and a restart. Prompts are
passages of Python's documentation. A third begins with one of four common beginnings, and a tenth
repeats an earlier prompt, so the prefix cache is used. The cache is so small that requests are
preempted, prompts are cut by a small token budget, and some streams are closed early. Then the server
is killed while it answers others, and started again. It answers some of the prompts one at a time.
Computation is in float32 and greedy. With `--exact page`, the default here, answers depend neither on
how prompts are cut nor on the prefix cache. So they must be those of the load. Where they part, the
logits of both tokens must be within `--tie` of each other, as rounding explains.
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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recorded import markdown, record
from tersekv.lab.evals import runs

FULL = "full"
NATIVE_TOKENS_IN_1_GIB = 46_592
"""SmolLM2 in bfloat16, from vLLM's line `CPU KV cache size`."""
PAGE = 128
STARTING_SECONDS = 300
QUESTION = 32
"""Ids of the question of each turn."""
BEGINNINGS, BEGINNING_TOKENS = 4, 70
COUNTERS = ("num_preemptions_total", "prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total")
LOGPROBS = {"return_tokens_as_token_ids": True, "logprobs": 3}

Request = tuple[list[int], int]
"""Ids of the prompt, and the number of new tokens."""


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


async def stream(session: Any, address: str, ids: list[int], new: int, **more: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the parts of an answer as they arrive. more: fields of the request."""
    body = {
        "model": "m", "prompt": ids, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, **more,
    }  # fmt: skip
    async with session.post(f"{address}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                if "choices" not in said:
                    raise SystemExit(f"the server said {said}")
                yield said["choices"][0]


async def send(count: int, one: Callable[[Any, int], Awaitable[None]]) -> None:
    """Call `one` with a session and each number up to `count`, all at once.

    Each request has its own connection, because the server closes idle ones, perhaps just when they are used again.
    """
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector) as session:
        await asyncio.gather(*(one(session, i) for i in range(count)))


def counters(address: str, names: Sequence[str]) -> dict[str, float]:
    """Return counters of the server."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    return {name: sum(map(float, re.findall(rf"^vllm:{name}\S* (\S+)", text, re.MULTILINE))) for name in names}


async def answers_under_load(address: str, args: argparse.Namespace) -> dict[str, Any]:
    """Send all requests. Return the answers by request, latencies and the time of all."""
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
                async for part in stream(session, address, said, args.new):
                    times.append(time.perf_counter() - started)
                    tokens += part.get("token_ids") or []
                    if i in cancelled and len(tokens) >= 3:
                        return
            each = (times[-1] - times[0]) / max(1, len(tokens) - 1)
            found[i].append({"tokens": tokens, "first": times[0], "each": each})
            said = said + tokens

    started = time.perf_counter()
    await send(args.requests, one)
    spent = time.perf_counter() - started
    done = [answer for answers in found for answer in answers]
    again = [] if args.turns else [i for i in range(3, len(found), 4) if found[i] and found[i - 3]]
    same = [found[i][0]["tokens"] == found[i - 3][0]["tokens"] for i in again]
    return {
        "seconds": spent, "done": len(done), "whole": sum(len(one["tokens"]) == args.new for one in done),
        "repeated": len(same), "repeated_same": sum(same), "first": sorted(one["first"] for one in done),
        "each": sorted(one["each"] for one in done),
    }  # fmt: skip


def load(args: argparse.Namespace) -> None:
    """Measure one recipe and append a record."""
    from tersekv.models.loading import prepare

    model, blocks = prepare(args.model), args.native_pages
    if args.recipe != FULL:
        whole = NATIVE_TOKENS_IN_1_GIB // PAGE
        blocks = int(args.native_pages * args.tokens_in_1_gib / PAGE / whole)
    longest = args.prompt + max(1, args.turns) * (QUESTION + args.new)
    with server(model, args.recipe, args.calibration, blocks, args.threads, longest=longest) as (address, _):
        measured = asyncio.run(answers_under_load(address, args))
        (preemptions,) = counters(address, COUNTERS[:1]).values()
    row = {
        "recipe": args.recipe, "pages": blocks, "native_pages": args.native_pages, "requests": args.requests,
        "at_once": args.at_once, "prompt": args.prompt, "new": args.new, "cancelled": args.cancel,
        "turns": args.turns, "preemptions": preemptions, **measured,
    }  # fmt: skip
    record(args.out, {"model": args.model, "threads": args.threads}, [row])
    print(load_table([row]))


def load_table(records: list[dict[str, Any]]) -> str:
    """Return the table of loads."""
    lines = []
    for r in records:
        first, each = ([statistics.quantiles(r[name], n=20)[i] for i in (9, 18)] for name in ("first", "each"))
        what = f"{r['requests']} x {r['prompt']:,} + {r['new']}"
        what += f", {r['turns']} turns" if r.get("turns") else ""
        cells = [what, f"`{r['recipe']}`", f"{r['done'] / r['seconds']:.2f}", f"{r['preemptions']:.0f}"]
        cells += [f"{first[0]:.1f} / {first[1]:.1f}", f"{1e3 * each[0]:.0f} / {1e3 * each[1]:.0f}"]
        lines.append([*cells, f"{r['whole']} of {r['done']}"])
    columns = (
        "load",
        "cache",
        "requests/s",
        "preemptions",
        "first token s, p50/p95",
        "next token ms, p50/p95",
        "whole",
    )
    return markdown(columns, lines)


def requests(tokenizer: Any, count: int, seed: int) -> list[Request]:
    """Return `count` requests of 8 to 200 prompt tokens and 4 to 48 new ones."""
    from tersekv.calibration.text import pydoc_text

    draw, ids = random.Random(seed), tokenizer(pydoc_text(), verbose=False)["input_ids"]
    common = [ids[i * 1000 : i * 1000 + BEGINNING_TOKENS] for i in range(BEGINNINGS)]
    made: list[Request] = []
    for i in range(count):
        if i > 20 and draw.random() < 0.1:
            made.append(draw.choice(made))
            continue
        start = draw.randrange(BEGINNINGS * 1000, len(ids) - 200)
        own = ids[start : start + draw.randint(8, 130)]
        made.append((draw.choice(common) + own if draw.random() < 1 / 3 else own, draw.randint(4, 48)))
    return made


async def answers(address: str, asked: list[Request], cancelled: set[int], at_once: int) -> list[Any]:
    """Send all requests, at most `at_once` at a time. Return the answer of each: new tokens with the logarithmic
    probabilities of the likeliest. It is None if it failed or was closed early."""
    import aiohttp

    slots, found = asyncio.Semaphore(at_once), [None] * len(asked)

    async def one(session: Any, i: int) -> None:
        tokens: list[tuple[int, dict[str, float]]] = []
        async with slots:
            with contextlib.suppress(aiohttp.ClientError):  # the server was killed
                async for choice in stream(session, address, *asked[i], **LOGPROBS):
                    tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
                    tokens += zip(choice.get("token_ids") or [], tops, strict=False)
                    if i in cancelled and len(tokens) >= 2:
                        return
                found[i] = tokens

    await send(len(asked), one)
    return found


async def killed(address: str, asked: list[Request], group: int, at_once: int, seconds: float) -> int:
    """Kill the server's processes while it answers. Return the number of requests that it did not finish."""
    task = asyncio.create_task(answers(address, asked, set(), at_once))
    await asyncio.sleep(seconds)
    os.killpg(group, signal.SIGKILL)
    return sum(answer is None for answer in await task)


def parted(a: list[Any], b: list[Any]) -> tuple[int, float] | None:
    """Return where two answers part and the difference of the two tokens' logits there; None if nowhere."""
    for i, ((x, tops), (y, _)) in enumerate(zip(a, b, strict=True)):
        if x != y:
            other = tops.get(f"token_id:{y}", float("-inf"))
            return i, tops[f"token_id:{x}"] - other
    return None


def compared(pairs: list[tuple[Any, Any]], tie: float) -> dict[str, Any]:
    """Return how many pairs of answers are the same, part at a tie, or part elsewhere. A lost answer is in no pair."""
    pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
    gaps = [p[1] for a, b in pairs if (p := parted(a, b)) is not None]
    return {
        "compared": len(pairs), "same": len(pairs) - len(gaps), "ties": sum(gap <= tie for gap in gaps),
        "other": sum(gap > tie for gap in gaps), "largest_gap": max(gaps, default=0.0),
    }  # fmt: skip


def robust(args: argparse.Namespace) -> None:
    """Run one recipe and append a record."""
    from transformers import AutoTokenizer

    from tersekv.models.loading import prepare

    model = prepare(args.model)
    asked = requests(AutoTokenizer.from_pretrained(model), args.requests, seed=0)
    draw = random.Random(1)
    cancelled = set(draw.sample(range(len(asked)), args.cancel))
    options = ["--dtype", "float32", "--block-size", "32", "--enable-prefix-caching", "--enable-chunked-prefill"]
    options += ["--max-num-batched-tokens", "256"]
    if args.speculate:
        ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
        options += ["--speculative-config", json.dumps(ngram)]
    section = {} if args.exact == "step" else {"exact": args.exact}
    start = (model, args.recipe, args.calibration, args.pages, args.threads, options, section)
    with server(*start) as (address, process):
        began = time.perf_counter()
        found = asyncio.run(answers(address, asked, cancelled, args.at_once))
        seconds, counted = time.perf_counter() - began, counters(address, COUNTERS)
        unfinished = asyncio.run(killed(address, asked[:100], process.pid, args.at_once, args.kill_after))
    again = draw.sample([i for i in range(len(asked)) if i not in cancelled], args.again)
    with server(*start) as (address, _):
        alone = asyncio.run(answers(address, [asked[i] for i in again], set(), 1))
    done = [i for i in range(len(asked)) if i not in cancelled]
    whole = sum(found[i] is not None and len(found[i]) == asked[i][1] for i in done)
    first: dict[str, int] = {}
    repeated = []
    for i in done:
        if (j := first.setdefault(json.dumps(asked[i]), i)) != i:
            repeated.append((found[j], found[i]))
    row = {
        "recipe": args.recipe, "exact": args.exact, "speculate": args.speculate, "requests": len(asked),
        "cancelled": len(cancelled), "at_once": args.at_once, "pages": args.pages, "seconds": seconds,
        "whole": whole, "done": len(done), **counted, "unfinished_at_kill": unfinished, "tie": args.tie,
        "repeated": compared(repeated, args.tie),
        "after_restart": compared([(found[i], b) for i, b in zip(again, alone, strict=True)], args.tie),
    }  # fmt: skip
    record(args.out, {"model": args.model, "threads": args.threads}, [row])
    print(robust_table(runs.read(args.out)[-1:]))


def robust_table(records: list[dict[str, Any]]) -> str:
    """Return the table of a thousand requests."""
    lines = []
    for r in records:
        cells = [f"`{r['recipe']}`", r["isa"], "yes" if r["speculate"] else "no", f"{r['whole']} of {r['done']}"]
        cells += [f"{r[name]:,.0f}" for name in COUNTERS] + [r["unfinished_at_kill"]]
        for name in ("repeated", "after_restart"):
            c = r[name]
            ties = f", {c['ties']} part at a tie" if c["ties"] else ""
            other = f", {c['other']} part elsewhere" if c["other"] else ""
            cells.append(f"{c['same']} of {c['compared']}{ties}{other}")
        lines.append(cells)
    columns = (
        "recipe",
        "kernels",
        "n-gram",
        "whole answers",
        "preemptions",
        "tokens from the prefix cache",
        "tokens guessed",
    )
    return markdown((*columns, "cut off by kill -9", "same when repeated", "same alone, after the restart"), lines)


def add_parsers(commands: Any) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Add the commands `load` and `robust`, and return them."""
    busy = commands.add_parser("load", help="measure one recipe under load and append a record")
    busy.add_argument("--tokens-in-1-gib", type=int, default=175_360, help="capacity that vLLM prints with the recipe")
    busy.add_argument("--native-pages", type=int, default=32, help="bytes of the cache in pages without a recipe")
    hard = commands.add_parser("robust", help="send a thousand requests, kill the server, and append a record")
    hard.add_argument("--exact", choices=("page", "step"), default="page", help="tokens that queries read exactly")
    hard.add_argument("--speculate", action="store_true", help="guess tokens by n-grams")
    hard.add_argument("--tie", type=float, default=1e-2, help="largest difference of logits that rounding explains")
    hard.add_argument("--kill-after", type=float, default=3.0, help="seconds of answering before kill -9")
    numbers = {"requests": 64, "at-once": 32, "prompt": 400, "new": 128, "cancel": 0, "turns": 0, "threads": 3}
    more = {"requests": 1000, "cancel": 100, "at-once": 48, "pages": 130, "again": 150, "threads": 2}
    for one, values in ((busy, numbers), (hard, more)):
        for name, value in values.items():
            one.add_argument(f"--{name}", type=int, default=value)
    return busy, hard
