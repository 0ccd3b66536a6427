"""Test SubGen's claim that memory and step time grow slower than the context (arXiv 2402.06082,
Theorem 1).

A stream of `--tokens` keys in `--clusters` balls is fed to the cache of one layer with one KV head.
At lengths that are powers of four, the program reports:

- the bytes held;
- the time of one step, which appends a token and attends;
- the error against exact attention over all tokens so far, which is checked before timing.

Appends JSON lines to --out.

    python benchmarks/subgen.py --out benchmarks/records/subgen.jsonl
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import tersekv
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.stores import new_store
from tersekv.cli import output
from tersekv.cli.installation import cpu_features
from tersekv.recipe import Recipe

SUBGEN = "subgen:variant=stream,sinks=0,recent=128,delta=1.01,slots=16,budget=2200"
RECIPES = ["exact", f"{SUBGEN}+exact", f"{SUBGEN}+kivi:bits=4", f"{SUBGEN}+polarquant"]
D = 64
CHUNK = 1024
MOST_ERROR = 0.5


def main() -> None:
    """Run all recipes over one stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--clusters", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15, help="timed steps per length")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    keys, values, queries = stream(args.tokens + args.steps * 16, args.clusters)
    for recipe in args.recipes:
        rows = run(recipe, keys, values, queries, args)
        show(recipe, rows)
        if args.out:
            with args.out.open("a") as file:
                for row in rows:
                    file.write(json.dumps(row | environment(recipe, args)) + "\n")


def stream(n: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a clustered stream: keys and values [1, 1, n, D] and queries [1, 1, 32, D].

    Keys are in m balls of diameter 1 around centers of norm 8. Values are around one mean per ball.
    """
    generator = torch.Generator().manual_seed(0)
    middles = torch.nn.functional.normalize(torch.randn(m, D, generator=generator), dim=-1) * 8
    means = torch.randn(m, D, generator=generator)
    ball = torch.randint(m, (n,), generator=generator)
    keys = torch.nn.functional.normalize(torch.randn(n, D, generator=generator), dim=-1).mul_(0.5).add_(middles[ball])
    values = torch.randn(n, D, generator=generator).mul_(0.3).add_(means[ball])
    queries = torch.randn(32, D, generator=generator)
    return keys[None, None], values[None, None], queries[None, None]


def run(recipe: str, keys: Tensor, values: Tensor, queries: Tensor, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return rows at lengths of 1,024 times powers of four, and at the whole stream."""
    store = new_store(Recipe.parse(recipe).plan(0, 1), keys, values)
    rows, seconds = [], 0.0
    lengths = [CHUNK * 4**i for i in range(16) if CHUNK * 4**i < args.tokens] + [args.tokens]
    for length in lengths:
        while store.num_tokens < length:
            part = slice(store.num_tokens, min(length, store.num_tokens + CHUNK))
            start = time.perf_counter()
            store.append(keys[:, :, part], values[:, :, part])
            seconds += time.perf_counter() - start
        error = relative_error(store, keys, values, queries)
        if error > MOST_ERROR:
            raise SystemExit(f"{recipe} at {length:,} tokens has a relative error of {error:.2f}: it is not timed")
        footprint = store.footprint()
        steps = [step(store, keys, values, queries) for _ in range(args.steps)]
        clusters = getattr(store, "clusters", None)
        rows.append(
            {
                "what": "subgen stream",
                "context_tokens": length,
                "bytes": footprint.total_bytes,
                "bytes_by_part": footprint.parts,
                "step_microseconds": statistics.median(steps) * 1e6,
                "feeding_seconds": round(seconds, 3),
                "relative_error": error,
                "clusters": None if clusters is None else clusters.centers.shape[2],
            }
        )
        output.report(f"{recipe} at {length:,} tokens: {footprint.total_bytes:,} bytes, error {error:.3f}")
    return rows


def relative_error(store: Any, keys: Tensor, values: Tensor, queries: Tensor) -> float:
    """Return the mean over queries of ‖estimate − attention‖ / ‖attention‖, over all tokens fed so
    far."""
    k, v = keys[0, 0, : store.num_tokens], values[0, 0, : store.num_tokens]
    truth = torch.softmax(queries[0, 0] @ k.T * D**-0.5, dim=-1) @ v
    got = torch.cat(
        [attend_store(store, AttentionCall(q[None, None, None], None, D**-0.5))[0, 0] for q in queries[0, 0]]
    )
    return float(((got - truth).norm(dim=-1) / truth.norm(dim=-1)).mean())


def step(store: Any, keys: Tensor, values: Tensor, queries: Tensor) -> float:
    """Return the seconds for appending one token and attending."""
    at = slice(store.num_tokens, store.num_tokens + 1)
    start = time.perf_counter()
    store.append(keys[:, :, at], values[:, :, at])
    attend_store(store, AttentionCall(queries[:, :, :1], None, D**-0.5))
    return time.perf_counter() - start


def environment(recipe: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings, versions and machine of the run."""
    return {
        "recipe": recipe,
        "clusters_in_stream": args.clusters,
        "head_dim": D,
        "seed": 0,
        "threads": torch.get_num_threads(),
        "cpu": cpu_features()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tersekv": tersekv.__version__,
    }


def show(recipe: str, rows: list[dict[str, Any]]) -> None:
    """Print a table of one recipe."""
    columns = ("tokens", "bytes", "µs per step", "error", "clusters")
    cells = [
        (
            f"{row['context_tokens']:,}",
            f"{row['bytes']:,}",
            f"{row['step_microseconds']:,.0f}",
            f"{row['relative_error']:.3f}",
            str(row["clusters"] or "-"),
        )
        for row in rows
    ]
    Console().print(output.table(recipe, columns, cells))


if __name__ == "__main__":
    main()
