"""Long streams of tokens: SubGen's claim about size and time, and caches with `memory=…`.

    python benchmarks/streams.py growth --out benchmarks/records/subgen.jsonl           # SubGen.
    python benchmarks/streams.py memory --out benchmarks/records/memory_budget.jsonl    # budgets.
    python benchmarks/streams.py memory --out … --tokens 20000 --recipes "h2o:memory=1MB+exact"  # others.

`growth` tests that memory and step time grow slower than the context (arXiv 2402.06082, Theorem 1).
A stream of `--tokens` keys in `--clusters` balls is fed to the cache of one layer with one KV head. At
lengths that are powers of four it reports the bytes held; the time of one step, which appends a token
and attends; and the error against exact attention over all tokens so far, which is checked before
timing.

`memory` reads a stream with a model of 2 layers, 4 query heads and 2 KV heads of 64 channels with
random weights. A prompt of 4,096 random tokens is read at once, then one token at a time. After every
token the footprint is compared with the memory. Each record has the largest footprint and the median
time per token of a twentieth of the stream.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor

import tersekv
from recorded import parser, record, show
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.cli import output
from tersekv.recipe import Recipe
from tersekv.units import parse_bytes

SUBGEN = "subgen:variant=stream,sinks=0,recent=128,delta=1.01,slots=16,budget=2200"
GROWING = ["exact", f"{SUBGEN}+exact", f"{SUBGEN}+kivi:bits=4", f"{SUBGEN}+polarquant"]
D = 64
CHUNK = 1024
MOST_ERROR = 0.5


LIMITED = (
    "streaming:memory=2MB,evict=block+turboquant:bits=4",
    "streaming:memory=2MB,rest=2,evict=block+turboquant:bits=4",
    "h2o:memory=2MB,evict=block+kivi:bits=4",
    "h2o:memory=2MB,rest=2,evict=block+kivi:bits=4",
)
PROMPT = 4096
PARTS = 20


def growth(args: argparse.Namespace) -> None:
    """Run all recipes over one stream."""
    tokens = args.tokens or 1 << 20
    keys, values, queries = stream(tokens + args.steps * 16, args.clusters)
    about = {"what": "subgen stream", "clusters_in_stream": args.clusters, "head_dim": D, "seed": 0}
    for recipe in args.recipes or GROWING:
        rows = grown(recipe, keys, values, queries, tokens, args.steps)
        cells = [
            [
                f"{r['context_tokens']:,}",
                f"{r['bytes']:,}",
                f"{r['step_microseconds']:,.0f}",
                f"{r['relative_error']:.3f}",
            ]
            for r in rows
        ]
        show(recipe, ("tokens", "bytes", "µs per step", "error"), cells)
        record(args.out, about, ({"recipe": recipe, **row} for row in rows))


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


def grown(recipe: str, keys: Tensor, values: Tensor, queries: Tensor, tokens: int, timed: int) -> list[dict[str, Any]]:
    """Return rows at lengths of 1,024 times powers of four, and at the whole stream."""
    store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values)
    rows, seconds = [], 0.0
    lengths = [CHUNK * 4**i for i in range(16) if CHUNK * 4**i < tokens] + [tokens]
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
        steps = [step(store, keys, values, queries) for _ in range(timed)]
        clusters = getattr(store, "clusters", None)
        rows.append(
            {
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


def small_model(positions: int) -> tf.PreTrainedModel:
    """Return a Llama of random weights for this many positions."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=positions,
    )
    return tf.LlamaForCausalLM(config).eval()


@torch.no_grad()
def limited(recipe: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Read the tokens and yield a row per part of the stream."""
    model = small_model(tokens)
    limit = parse_bytes(Recipe.parse(recipe).policy().options()["memory"], "memory")
    ids = torch.randint(512, (1, tokens), generator=torch.Generator().manual_seed(1))
    with tersekv.compress(model, recipe):
        cache = tersekv.CompressedCache(model, recipe)
        model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
        times, most, part = [], 0, (tokens - PROMPT) // PARTS
        for i in range(PROMPT, tokens):
            start = time.perf_counter()
            model(ids[:, i : i + 1], past_key_values=cache)
            times.append(time.perf_counter() - start)
            most = max(most, cache.footprint().total_bytes)
            if len(times) == part:
                milliseconds = round(1e3 * statistics.median(times), 3)
                yield {"tokens": i + 1, "memory": limit, "most_bytes": most, "milliseconds": milliseconds}
                times, most = [], 0


def memory(args: argparse.Namespace) -> None:
    """Run every recipe, and add a record per part of the stream."""
    for recipe in args.recipes or LIMITED:
        for row in limited(recipe, args.tokens or 200_000):
            record(args.out, {}, [{"recipe": recipe, **row}])
            print(recipe, row, flush=True)


def main() -> None:
    """Parse the options and run the command."""
    options = parser(__doc__)
    options.add_argument("what", choices=("growth", "memory"))
    options.add_argument("--tokens", type=int, help="length of the stream (default: 2^20, and 200,000 for memory)")
    options.add_argument("--clusters", type=int, default=64)
    options.add_argument("--steps", type=int, default=15, help="timed steps per length")
    options.add_argument("--recipes", nargs="*")
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    (growth if args.what == "growth" else memory)(args)


if __name__ == "__main__":
    main()
