"""Decoding speed of stock `generate`, eager and compiled, with transformers' caches and packed
ones.

    python benchmarks/compiled.py [--out benchmarks/records/compiled.jsonl] [--depths 1000 8000]
        [--dtypes float32 bfloat16] [--recipes default kivi:bits=4] [--new-tokens 64] [--rounds 5]

The contenders are DynamicCache (eager), StaticCache (compiled decode step), and each recipe in both
modes. Caches are filled by one exact prefill of Python's language reference; then `generate`
decodes greedily.

The first call of each contender compiles and is not counted. `compile_seconds` is its additional
time; recipes share a graph. Contenders take turns in every round. Rates omit the first tokens, and
the first of these is read eagerly.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

import tersekv
from tersekv.cli.installation import cpu_features
from tersekv.hf.prefill import Prefill, new_cache
from tersekv.lab.bench.generate import prompt
from tersekv.models.loading import load

WARM_UP = 3
"""Number of first tokens of each call that the rates omit."""

EAGER, COMPILED = "eager", "compiled"


class Clock:
    """A streamer for `generate` that records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Record the time. `generate` calls this with the prompt and then with each token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing. `generate` calls this after the last token."""

    @property
    def rate(self) -> float:
        """Tokens per second after the first `WARM_UP` ones."""
        first, *_, last = self.times[1 + WARM_UP :]
        return (len(self.times) - 2 - WARM_UP) / (last - first)


@dataclass
class Contender:
    """A cache, a mode and its measurements. recipe: None for transformers' own cache."""

    recipe: str | None
    mode: str
    rates: list[float] = field(default_factory=list)
    compile_seconds: float | None = None
    graphs: int = 0
    tokens: list[int] = field(default_factory=list)

    @property
    def cache(self) -> str:
        """Name of the cache in records."""
        return self.recipe or ("static" if self.mode == COMPILED else "dynamic")


@torch.inference_mode()
def measure(
    model: Any, prefill: Prefill, ids: Tensor, recipes: Sequence[str], new_tokens: int, rounds: int, backend: str
) -> list[Contender]:
    """Measure all contenders after ids [1, depth + 1]. `generate` itself reads the last token."""
    contenders = [Contender(recipe, mode) for recipe in (None, *recipes) for mode in (EAGER, COMPILED)]
    torch.compiler.reset()
    for turn in range(1 + rounds):
        for contender in contenders:
            started = counters["stats"]["unique_graphs"]
            seconds, clock, tokens = run(model, prefill, ids, contender, new_tokens, backend)
            contender.graphs += counters["stats"]["unique_graphs"] - started
            if turn == 0:
                contender.compile_seconds, contender.tokens = seconds, tokens
                continue
            if turn == 1 and contender.mode == COMPILED and contender.compile_seconds is not None:
                contender.compile_seconds = max(0.0, contender.compile_seconds - seconds)
            elif turn == 1:
                contender.compile_seconds = None
            contender.rates.append(clock.rate)
    return contenders


def run(
    model: Any, prefill: Prefill, ids: Tensor, contender: Contender, new_tokens: int, backend: str
) -> tuple[float, Clock, list[int]]:
    """Call `generate` once. Return its seconds, the times of its tokens, and the tokens."""
    total = ids.shape[1] + WARM_UP + new_tokens + 1
    if contender.recipe is None and contender.mode == COMPILED:
        cache: Any = StaticCache(config=model.config, max_cache_len=total)
    elif contender.recipe is None:
        cache = DynamicCache(config=model.config)
    else:
        cache = new_cache(model, contender.recipe)
    prefill.fill(cache, ids[:, :-1])
    compiling = None
    if contender.mode == COMPILED:
        compiling = CompileConfig(fullgraph=True, backend=backend, mode=None)
        compiling._compile_all_devices = True
    clock, start = Clock(), time.perf_counter()
    with nullcontext() if contender.recipe is None else tersekv.compress(model, contender.recipe):
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, streamer=clock, compile_config=compiling,
            do_sample=False, min_new_tokens=WARM_UP + new_tokens, max_new_tokens=WARM_UP + new_tokens,
            pad_token_id=0,
        )  # fmt: skip
    return time.perf_counter() - start, clock, out[0, ids.shape[1] :].tolist()


def documents(contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Return the entries of records.

    equal_tokens: number of first tokens that are the same as in eager mode. A static cache is
    compared with a dynamic one.
    """
    eager = {contender.recipe: contender.tokens for contender in contenders if contender.mode == EAGER}
    rows = []
    for contender in contenders:
        pairs = list(zip(contender.tokens, eager[contender.recipe], strict=True))
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        rows.append({
            "cache": contender.cache, "mode": contender.mode, "graphs": contender.graphs, "equal_tokens": equal,
            "compile_seconds": contender.compile_seconds and round(contender.compile_seconds, 2),
            "tokens_per_second": round(statistics.median(contender.rates), 3),
            "rates": [round(rate, 3) for rate in contender.rates],
        })  # fmt: skip
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a known name or a folder")
    parser.add_argument("--depths", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--recipes", nargs="+", default=["default", "kivi:bits=4"])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    options = parser.parse_args(arguments)
    if options.new_tokens < 2 or options.rounds < 1:
        parser.error("--new-tokens must be at least 2 and --rounds at least 1")
    common = {
        "bench": "compiled", "model": options.model, "cpu": cpu_features()[0], "threads": torch.get_num_threads(),
        "backend": options.backend, "torch": torch.__version__, "transformers": transformers.__version__,
        "tersekv": tersekv.__version__,
    }  # fmt: skip
    table = Table(title=f"{options.model}: tokens per second, median of {options.rounds} rounds")
    for column in ("dtype", "depth", "cache", "mode", "tokens/s", "compile s", "graphs", "equal tokens"):
        table.add_column(column, justify="left" if column in ("dtype", "cache", "mode") else "right")
    for dtype in options.dtypes:
        model, tokenizer = load(options.model, dtype)
        prefill = Prefill(model)
        for depth in options.depths:
            ids = prompt(tokenizer, depth + 1)
            found = measure(
                model, prefill, ids, options.recipes, options.new_tokens, options.rounds, options.backend
            )  # fmt: skip
            for row in documents(found):
                shown = ("cache", "mode", "tokens_per_second", "compile_seconds", "graphs", "equal_tokens")
                table.add_row(dtype, f"{depth:,}", *(str(row[name]) for name in shown))
                if options.out:
                    load_average = round(os.getloadavg()[0], 2)
                    options.out.parent.mkdir(parents=True, exist_ok=True)
                    with options.out.open("a") as file:
                        file.write(
                            json.dumps(common | {"dtype": dtype, "depth": depth} | row | {"load_average": load_average})
                            + "\n"
                        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
