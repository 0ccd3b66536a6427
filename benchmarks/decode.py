"""Decoding with packed caches: agreement with the full cache, compiled steps, and llama.cpp's attention.

    python benchmarks/decode.py agreement [--recipes kivi:bits=4] --out benchmarks/records/main_job.jsonl # tokens.
    python benchmarks/decode.py compiled --out benchmarks/records/compiled.jsonl [--depths 1000 8000]
        [--dtypes float32 bfloat16] [--recipes default kivi:bits=4] [--new-tokens 64] [--rounds 5]  # compiled steps.
    pip install llama-cpp-python
    python benchmarks/decode.py llama --gguf FILE.gguf --depths 8000 --threads 1 [--out FILE.jsonl]  # llama.cpp.

`agreement`: for each of `--prompts` places in Python's language reference, tokens are decoded greedily
with transformers' own cache (float32) and with the recipe. The record has the number of equal first
tokens, and the cache's bytes. `tersekv bench generate` measures the speed of both.

`compiled`: stock `generate` with DynamicCache (eager), StaticCache (compiled decode step), and each
recipe in both modes. Caches are filled by one exact prefill of Python's language reference; then
`generate` decodes greedily. The first call of each contender compiles and is not counted.
`compile_seconds` is its additional time; recipes share a graph. Contenders take turns in every round.
Rates omit the first tokens, and the first of these is read eagerly.

`llama`: the weights differ (quantised in a GGUF file, float32 in ours), so tokens per second are not
comparable. The cost of the cache is comparable: milliseconds per token at the depth minus those at
depth 0, with the same threads. Ours run in transformers with packed attention. All take turns in every
round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache, StaticCache

import tersekv
from recorded import add_models, parser, record, show
from tersekv.calibration.text import pydoc_text
from tersekv.cli import measure as program
from tersekv.hf.prefill import Prefill, new_cache
from tersekv.lab.bench.generate import prompt
from tersekv.models.loading import load

WARM_UP = 3
"""Number of first tokens of each call that the rates omit."""

EAGER, COMPILED = "eager", "compiled"


TYPES = {"f16": 1, "q8_0": 8, "q4_0": 2}
"""llama.cpp's cache types, with their numbers in its library."""

NEAR = 16
"""Number of tokens in the cache at "depth 0", so that the cache is not empty."""

DEFAULTS = {
    "agreement": {"new_tokens": 64, "rounds": 0, "depths": [4096]},
    "compiled": {"new_tokens": 64, "rounds": 5, "depths": [1000, 8000]},
    "llama": {"new_tokens": 16, "rounds": 5, "depths": [8000]},
}


# ---------------------------------------------------------------- agreement


def agreement(args: argparse.Namespace) -> None:
    """Measure the common prefix of greedy continuations of prompts from the whole corpus, and the
    cache's size."""
    (tokens,), sampling = args.depths, program.Sampling(args.new_tokens, temperature=0, min_tokens=args.new_tokens)
    for name in args.model or ["smollm2"]:
        model, tokenizer = load(name, "float32")
        for recipe in args.recipes or ["kivi:bits=4"]:
            common = []
            for i in range(args.prompts):
                ids = prompt(tokenizer, tokens, i * len(pydoc_text()) // args.prompts)
                full, packed = (program.generate(model, tokenizer, ids, r, sampling) for r in (None, recipe))
                common.append(program.agreement(full, packed))
                print(f"prompt {i + 1} of {args.prompts}: the first {common[-1]} of {args.new_tokens} tokens agree")
            held = packed.footprint
            row = {
                "recipe": recipe, "common_prefix": common, "at_least_16": sum(c >= 16 for c in common),
                "bytes": held.total_bytes, "bytes_by_part": held.parts, "bits_per_element": held.bits_per_element,
                "share_of_bf16": 1 / held.ratio(16),
            }  # fmt: skip
            about = {"what": "agreement", "model": name, "context_tokens": tokens, "new_tokens": args.new_tokens}
            record(args.out, about, [row])
            print(
                f"{name}, {recipe}: {row['share_of_bf16']:.3f} of bfloat16's bytes; median {statistics.median(common)}"
            )


# ---------------------------------------------------------------- compiled steps


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


def compiled(args: argparse.Namespace) -> None:
    """Time all contenders with each model, dtype and depth."""
    if args.new_tokens < 2 or args.rounds < 1:
        raise SystemExit("--new-tokens must be at least 2 and --rounds at least 1")
    recipes = args.recipes or ["default", "kivi:bits=4"]
    for name in args.model or ["smollm2"]:
        about, made = {"bench": "compiled", "model": name, "backend": args.backend}, []
        for dtype in args.dtypes:
            model, tokenizer = load(name, dtype)
            prefill = Prefill(model)
            for depth in args.depths:
                ids = prompt(tokenizer, depth + 1)
                found = measure(model, prefill, ids, recipes, args.new_tokens, args.rounds, args.backend)
                for row in documents(found):
                    made.append([dtype, depth, *row.values()])
                    more = {"dtype": dtype, "depth": depth, "load_average": round(os.getloadavg()[0], 2)}
                    record(args.out, about, [more | row])
        show(f"{name}: median of {args.rounds} rounds", ("dtype", "depth", *row), made)


# ---------------------------------------------------------------- llama.cpp


def llama_cpp(path: Path, cache: str, depth: int, threads: int, new_tokens: int) -> Callable[[], float]:
    """Return a function that decodes after `depth` tokens and returns the milliseconds per token."""
    from llama_cpp import Llama

    kind = TYPES[cache]
    model = Llama(
        str(path), n_ctx=depth + 2 * new_tokens, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False,
        flash_attn=True, type_k=kind, type_v=kind,
    )  # fmt: skip
    ids = [1000 + i * 7919 % 40000 for i in range(depth)]
    model.eval(ids)

    def decode() -> float:
        model.n_tokens = depth
        start = time.perf_counter()
        for i in range(new_tokens):
            model.eval([1000 + i])
        return (time.perf_counter() - start) / new_tokens * 1e3

    return decode


def ours(recipe: str, depth: int, new_tokens: int) -> Callable[[], float]:
    """Return the same function with transformers. `full` is its own cache."""
    model, _ = load("smollm2", dtype="float32")
    ids = torch.tensor([[1000 + i * 7919 % 40000 for i in range(depth)]])
    full = recipe == "full"
    cache = DynamicCache(config=model.config) if full else tersekv.CompressedCache(model.config, recipe)

    def attention() -> Any:
        return nullcontext() if full else tersekv.compress(model, recipe)

    with torch.inference_mode(), attention():
        for part in ids.split(512, dim=1):
            model(part, past_key_values=cache, logits_to_keep=1)

    def decode() -> float:
        with torch.inference_mode(), attention():
            start = time.perf_counter()
            for i in range(new_tokens):
                model(torch.tensor([[1000 + i]]), past_key_values=cache, logits_to_keep=1)
            spent = (time.perf_counter() - start) / new_tokens * 1e3
        cache.crop(-new_tokens)
        return spent

    return decode


def llama(args: argparse.Namespace) -> None:
    """Measure and print, and append a record per cache."""
    if args.gguf is None:
        raise SystemExit("give --gguf, SmolLM2-135M as a GGUF file")
    caches = [*(f"llama.cpp {kind}" for kind in TYPES), "full", *(args.recipes or ["default", "kivi:bits=4"])]

    def decoder(cache: str, depth: int) -> Callable[[], float]:
        _, found, kind = cache.partition("llama.cpp ")
        if not found:
            return ours(cache, depth, args.new_tokens)
        return llama_cpp(args.gguf, kind, depth, args.threads, args.new_tokens)

    for depth in args.depths:
        runs = {cache: (decoder(cache, NEAR), decoder(cache, depth)) for cache in caches}
        spent: dict[str, list[tuple[float, float]]] = {cache: [] for cache in caches}
        for _ in range(args.rounds + 1):
            for cache, (near, far) in runs.items():
                spent[cache].append((near(), far()))
        for cache, (_, *times) in spent.items():  # the first round warms up
            more = [far - near for near, far in times]
            row: dict[str, Any] = {
                "cache": cache,
                "ms_near": [near for near, _ in times],
                "ms_far": [far for _, far in times],
            }
            row["ms_of_cache"] = statistics.median(more)
            record(args.out, {"depth": depth, "new_tokens": args.new_tokens}, [row])
            low, high = min(more), max(more)
            print(f"{cache:20s} {row['ms_of_cache']:7.2f} ms more per token at {depth:,} ({low:.2f} to {high:.2f})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the options and run the command."""
    options = parser(__doc__)
    options.add_argument("what", choices=DEFAULTS)
    add_models(options)
    options.add_argument("--depths", type=int, nargs="+", help="tokens of the context")
    options.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="for compiled")
    options.add_argument("--recipes", nargs="+")
    options.add_argument("--new-tokens", type=int)
    options.add_argument("--rounds", type=int)
    options.add_argument("--prompts", type=int, default=10, help="for agreement")
    options.add_argument("--backend", default="inductor", help="for compiled")
    options.add_argument("--gguf", type=Path, help="for llama: SmolLM2-135M as a GGUF file")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--out", type=Path, help="add records to this file")
    args = options.parse_args(arguments)
    for name, value in DEFAULTS[args.what].items():
        setattr(args, name, getattr(args, name) or value)
    torch.set_num_threads(args.threads)
    {"agreement": agreement, "compiled": compiled, "llama": llama}[args.what](args)


if __name__ == "__main__":
    main()
