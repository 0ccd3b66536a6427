"""Prefill and decode seconds of vLLM with packed caches beside its own, measured in turns.

All engines are in one process, and every round runs each of them once, so that other load on the
machine meets all alike.

    python benchmarks/serving_speed.py run --recipes full turboquant:bits=4 --shapes 8x400x129 --out FILE
    python benchmarks/serving_speed.py table FILE… --into docs/serving.md

A shape is requests x prompt tokens x new tokens. Prompts are random ids, which greedy decoding
continues without stopping. Every step of an engine is timed. Prefill is the sum of steps until the last
request has its first token. Decode is the median step after that, with all requests running.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from serving import FULL, engine, write_between

BEGIN, END = "<!-- speed: made by benchmarks/serving_speed.py -->", "<!-- end of speed -->"


def steps(llm: Any, ids: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Answer one batch. Return the seconds of prefill and of a median decoding step."""
    import vllm

    sampling = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    core, made = llm.llm_engine, {str(i): 0 for i in range(len(ids))}
    for name, row in zip(made, ids, strict=True):
        core.add_request(name, {"prompt_token_ids": row}, sampling)
    prefill, decode = 0.0, []
    while core.has_unfinished_requests():
        begun, running = all(made.values()), all(n < new_tokens for n in made.values())
        started = time.perf_counter()
        outs = core.step()
        spent = time.perf_counter() - started
        for out in outs:
            made[out.request_id] = len(out.outputs[0].token_ids)
        if not begun:
            prefill += spent
        elif running:
            decode.append(spent)
    return prefill, statistics.median(decode or [math.nan])  # short answers may end before the last one begins


def capacity(llm: Any) -> int:
    """Return the tokens that an engine's cache holds."""
    return int(llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens)


def run(args: argparse.Namespace) -> None:
    """Measure all recipes in turns and append a record per shape."""
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch
    import vllm

    from tersekv.models.loading import prepare

    torch.set_num_threads(args.threads)
    model = prepare(args.model)
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    longest, most = max(p + n for _, p, n in shapes), max(b for b, _, _ in shapes)
    options = {"max_model_len": longest, "max_num_seqs": most, "enable_prefix_caching": False}
    engines = {recipe: engine(model, recipe, args.calibration, **options) for recipe in args.recipes}
    for requests, prompt, new in shapes:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(1000, 40000, (requests, prompt), generator=draw).tolist()
        times: dict[str, list[tuple[float, float]]] = {recipe: [] for recipe in engines}
        for llm in engines.values():
            steps(llm, [row[: args.warm_up] for row in ids], 3)  # first calls allocate memory
        for _ in range(args.rounds):
            for recipe, llm in engines.items():
                times[recipe].append(steps(llm, ids, new))
        record = {
            "shape": [requests, prompt, new], "threads": args.threads, "model": args.model, "rounds": args.rounds,
            "seconds": times, "vllm": vllm.__version__, "torch": torch.__version__, "machine": platform.machine(),
            "tokens_in_1_gib": {recipe: capacity(llm) for recipe, llm in engines.items()},
        }  # fmt: skip
        with args.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print("\n".join(rows([record])))


def rows(records: list[dict[str, Any]]) -> list[str]:
    """Return a table: medians over rounds, and the median of the ratios to vLLM's own cache of a round."""
    lines = [
        "| requests x prompt x new | cache | prefill s | decode ms per step | prefill | decode |",
        "|---|---|---|---|---|---|",
    ]
    for record in records:
        native = record["seconds"][FULL]
        for recipe, times in record["seconds"].items():
            spent = [statistics.median(t[i] for t in times) for i in (0, 1)]
            faster = [statistics.median(own[i] / t[i] for own, t in zip(native, times, strict=True)) for i in (0, 1)]
            shape = " x ".join(f"{n:,}" for n in record["shape"])
            cells = [f"{spent[0]:.2f}", f"{1e3 * spent[1]:.1f}", *(f"{x:.2f}x" for x in faster)]
            lines.append(f"| {shape} | `{recipe}` | {' | '.join(cells)} |")
    return lines


def table(args: argparse.Namespace) -> None:
    """Print the table, or write it between its markers."""
    records = [json.loads(line) for path in args.records for line in path.read_text().splitlines()]
    write_between(args.into, BEGIN, END, rows(records))


def main() -> None:
    """Parse the options and run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    go = commands.add_parser("run", help="measure recipes in turns and append a record per shape")
    go.add_argument("--recipes", nargs="+", required=True, help=f"recipes; {FULL!r} is vLLM's own cache and needed")
    go.add_argument("--calibration", help="calibration file of recipes with trellis")
    go.add_argument("--shapes", nargs="+", default=["8x400x129"])
    go.add_argument("--rounds", type=int, default=3)
    go.add_argument("--warm-up", type=int, default=400, help="prompt tokens of a batch that is not timed")
    go.add_argument("--threads", type=int, default=3)
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
