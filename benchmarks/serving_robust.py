"""A thousand requests to vLLM's server: no token may be lost or garbled, also after kill -9 and a restart.

    python benchmarks/serving_robust.py run --recipe turboquant:bits=4 --out FILE          # and --speculate
    python benchmarks/serving_robust.py table FILE --into docs/serving.md

Prompts are passages of Python's documentation. A third begins with one of four common beginnings, and
a tenth repeats an earlier prompt, so the prefix cache is used. The cache is so small that requests are
preempted, prompts are cut by a small token budget, and some streams are closed early. Then the server
is killed while it answers others, and started again. It answers some of the prompts one at a time.

Computation is in float32 and greedy. With `--exact page`, the default here, answers depend neither on how
prompts are cut nor on the prefix cache. So they must be those of the load. Where they part, the logits of
both tokens must be within `--tie` of each other, as rounding explains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

from serving import write_between
from serving_load import server

BEGIN, END = "<!-- robust: made by benchmarks/serving_robust.py -->", "<!-- end of robust -->"
BEGINNINGS, BEGINNING_TOKENS = 4, 70
COUNTERS = ("num_preemptions_total", "prefix_cache_hits_total", "spec_decode_num_accepted_tokens_total")

Request = tuple[list[int], int]
"""Ids of the prompt, and the number of new tokens."""


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


async def ask(session: Any, address: str, request: Request, cancel: bool) -> list[tuple[int, dict[str, float]]] | None:
    """Return each new token with the logarithmic probabilities of the likeliest; None if closed early."""
    ids, new = request
    body = {
        "model": "m", "prompt": ids, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 3,
    }  # fmt: skip
    found: list[tuple[int, dict[str, float]]] = []
    async with session.post(f"{address}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}: {(await answer.text())[:500]}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                if "choices" not in said:
                    raise SystemExit(f"the server said {said}")
                choice = said["choices"][0]
                tops = (choice.get("logprobs") or {}).get("top_logprobs") or []
                found += zip(choice.get("token_ids") or [], tops, strict=False)
                if cancel and len(found) >= 2:
                    return None
    return found


async def load(address: str, asked: list[Request], cancelled: set[int], at_once: int) -> list[Any]:
    """Send all requests, at most `at_once` at a time. Return answers by request; None if it failed or was closed."""
    import aiohttp

    slots, found = asyncio.Semaphore(at_once), [None] * len(asked)

    async def one(session: Any, i: int) -> None:
        async with slots:
            try:
                found[i] = await ask(session, address, asked[i], i in cancelled)
            except aiohttp.ClientError:
                found[i] = None  # the server was killed

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session, i) for i in range(len(asked))))
    return found


async def killed(address: str, asked: list[Request], group: int, at_once: int, seconds: float) -> int:
    """Kill the server's processes while it answers. Return the number of requests that it did not finish."""
    task = asyncio.create_task(load(address, asked, set(), at_once))
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


def counters(address: str) -> dict[str, float]:
    """Return the server's counters."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    return {name: sum(map(float, re.findall(rf"^vllm:{name}\S* (\S+)", text, re.MULTILINE))) for name in COUNTERS}


def compared(pairs: list[tuple[Any, Any]], tie: float) -> dict[str, Any]:
    """Return how many pairs of answers are the same, part at a tie, or part elsewhere."""
    gaps = [p[1] for a, b in pairs if (p := parted(a, b)) is not None]
    return {
        "compared": len(pairs), "same": len(pairs) - len(gaps), "ties": sum(gap <= tie for gap in gaps),
        "other": sum(gap > tie for gap in gaps), "largest_gap": max(gaps, default=0.0),
    }  # fmt: skip


def run(args: argparse.Namespace) -> None:
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
        answers = asyncio.run(load(address, asked, cancelled, args.at_once))
        seconds, counted = time.perf_counter() - began, counters(address)
        unfinished = asyncio.run(killed(address, asked[:100], process.pid, args.at_once, args.kill_after))
    again = draw.sample([i for i in range(len(asked)) if i not in cancelled], args.again)
    with server(*start) as (address, _):
        alone = asyncio.run(load(address, [asked[i] for i in again], set(), 1))
    done = [i for i in range(len(asked)) if i not in cancelled]
    whole = sum(answers[i] is not None and len(answers[i]) == asked[i][1] for i in done)
    first: dict[str, int] = {}
    repeated = []
    for i in done:
        if (j := first.setdefault(json.dumps(asked[i]), i)) != i:
            repeated.append((answers[j], answers[i]))
    record = {
        "recipe": args.recipe, "exact": args.exact, "speculate": args.speculate, "requests": len(asked),
        "cancelled": len(cancelled), "at_once": args.at_once, "pages": args.pages, "seconds": seconds,
        "whole": whole, "done": len(done), **counted, "unfinished_at_kill": unfinished, "tie": args.tie,
        "repeated": compared(repeated, args.tie),
        "after_restart": compared([(answers[i], b) for i, b in zip(again, alone, strict=True)], args.tie),
    }  # fmt: skip
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print("\n".join(rows([record])))


def rows(records: list[dict[str, Any]]) -> list[str]:
    """Return the table of records."""
    lines = ["| recipe | n-gram | whole answers | preemptions | tokens from the prefix cache | tokens guessed |"]
    lines[0] += " cut off by kill -9 | same when repeated | same alone, after the restart |"
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for r in records:
        cells = [f"`{r['recipe']}`", "yes" if r["speculate"] else "no", f"{r['whole']} of {r['done']}"]
        cells += [f"{r[name]:,.0f}" for name in COUNTERS] + [r["unfinished_at_kill"]]
        for name in ("repeated", "after_restart"):
            c = r[name]
            ties = f", {c['ties']} part at a tie" if c["ties"] else ""
            other = f", {c['other']} part elsewhere" if c["other"] else ""
            cells.append(f"{c['same']} of {c['compared']}{ties}{other}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def table(args: argparse.Namespace) -> None:
    """Print the table, or write it between its markers."""
    records = [json.loads(line) for path in args.records for line in path.read_text().splitlines()]
    write_between(args.into, BEGIN, END, rows(records))


def main() -> None:
    """Parse the options and run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    go = commands.add_parser("run", help="run one recipe and append a record")
    go.add_argument("--recipe", required=True, help="a recipe, or 'full'")
    go.add_argument("--calibration", help="calibration file of recipes with trellis")
    go.add_argument("--exact", choices=("page", "step"), default="page", help="tokens that queries read exactly")
    go.add_argument("--speculate", action="store_true", help="guess tokens by n-grams")
    go.add_argument("--tie", type=float, default=1e-2, help="largest difference of logits that rounding explains")
    go.add_argument("--kill-after", type=float, default=3.0, help="seconds of answering before kill -9")
    numbers = (("requests", 1000), ("cancel", 100), ("at-once", 48), ("pages", 130), ("again", 150), ("threads", 2))
    for name, value in numbers:
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
