"""Time and calls of one decode step of one layer: append a token and attend.

    python benchmarks/layer_step.py [--out benchmarks/records/layer_step.jsonl] [--recipes default qjl]
        [--dtype bfloat16] [--threads 1] [--rounds 9] [--tokens 1024 8192]
    python benchmarks/layer_step.py --compare mixed [--out benchmarks/records/mixed_step.jsonl]
    python benchmarks/layer_step.py --compare heads [--out benchmarks/records/heads_step.jsonl]

Times are medians in microseconds over rounds in which the caches take turns. "exact" is
transformers' DynamicLayer with scaled_dot_product_attention. Calls are counted per layer in a model
of 4 layers after 600 tokens: Python calls in files of tersekv, and calls of its extension.

`--compare mixed` compares the policy `mixed` with equal rates instead, of the same mean bits where the
method has them. `--compare heads` compares heads that keep different numbers of tokens with heads that
keep their mean.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import recorded
import tersekv
from recorded import record, show
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import Observed
from tersekv.hf.cache import CompressedCache
from tersekv.kernels import cpu
from tersekv.recipe import Recipe
from tersekv.transforms.rope import standard_rope

EXACT = "exact"
RECIPES = ("default", "kivi:bits=4", "kvquant:bits=3,calibration=prompt", "polarquant", "qjl", "turboquant:bits=4")
COUNTED = (
    *RECIPES, "turboquant:bits=2.5", "snapkv:budget=128+kivi:bits=4", "streaming:budget=128+kivi:bits=4",
    "h2o:budget=128+kivi:bits=4", "subgen:budget=128+kivi:bits=4",
)  # fmt: skip
MIXED = (
    ("trellis:bits=2.5,calibration=prompt", "mixed:budget=0.25,rest=2+trellis:bits=4,calibration=prompt"),
    ("kivi:bits=2", "mixed:budget=0.25,rest=2+kivi:bits=4"),
    ("turboquant:bits=2", "mixed:budget=0.25,rest=2+turboquant:bits=4"),
)  # fmt: skip
"""Equal rates, and two rates with a mean of 2.5 bits."""

HEADS = tuple(
    (f"snapkv:budget=0.25+{codec}", f"headkv:budget=0.25,beta=1+{codec}")
    for codec in ("trellis:bits=4,calibration=prompt", "kivi:bits=4", "polarquant", "exact")
)
"""Heads that keep a quarter of the tokens each, and on average."""

IMPORTANCE = (1.0, 2.0, 4.0)
"""Importance of heads in turn. With 8 heads the first one keeps an eighth of the tokens, the third almost half."""

COMPARED = {"mixed": MIXED, "heads": HEADS}

SHAPES = ((9, 3, 64), (32, 8, 128))
"""Query heads, key-value heads and head dim of SmolLM2-135M and Llama-3.1-8B."""

TOKENS, COMPARED_TOKENS = (1024, 8192), (8192, 32768)
WARM_UP, STEPS = 8, 64
"""Numbers of untimed and of timed steps per cache and round."""


def calls(recipe: str) -> tuple[float, float]:
    """Count Python calls in files of tersekv and calls of its extension, per layer of a decode
    step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=64, num_hidden_layers=4,
        intermediate_size=64, vocab_size=64,
    )  # fmt: skip
    model, counts = LlamaForCausalLM(config).eval(), {"python": 0, "native": 0}
    ours, native = tuple(tersekv.__path__), cpu.loaded()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            counts["python"] += 1

    class Counted:
        def __getattr__(self, name: str) -> Any:
            counts["native"] += 1
            return getattr(native, name)

    with torch.no_grad(), tersekv.compress(model, recipe):
        cache = CompressedCache(model, recipe)
        model(torch.randint(0, 64, (1, 600)), past_key_values=cache)
        for _ in range(3):
            model(torch.randint(0, 64, (1, 1)), past_key_values=cache)
        sys.setprofile(count)
        try:
            model(torch.randint(0, 64, (1, 1)), past_key_values=cache)
        finally:
            sys.setprofile(None)
        with mock.patch.object(cpu, "_module", Counted()):
            model(torch.randint(0, 64, (1, 1)), past_key_values=cache)
    return counts["python"] / 4, counts["native"] / 4


def filled(recipe: str, shape: Sequence[int], tokens: int, dtype: torch.dtype) -> Any:
    """Return a layer that holds `tokens` tokens: a store of tersekv, or transformers' own."""
    _, H, D = shape
    keys, values = torch.randn(2, 1, H, tokens, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    if recipe == EXACT:
        layer = DynamicLayer()
        layer.update(keys, values)
        return layer
    scores = torch.tensor(IMPORTANCE).repeat(H)[:H].expand(8, H)
    plan = Recipe.parse(recipe).plan(3, 8)._replace(scores=scores)
    store = LayerStore(plan, keys[:, :, :0], values[:, :, :0], None, standard_rope(D))
    # only the number of tokens of each rate or head matters here, not which ones
    store.append(keys, values, None, Observed(*torch.rand(2, 1, H, tokens)))
    return store


def step(layer: Any, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], Any]:
    """Return a function that appends a token to a layer and attends over all its tokens."""
    Hq, H, D = shape
    made = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 1, H, 1, D, generator=made).to(dtype)
    query, scaling = torch.randn(1, Hq, 1, D, generator=made).to(dtype), D**-0.5
    if isinstance(layer, DynamicLayer):

        def exact() -> None:
            k, v = layer.update(key, value)
            scaled_dot_product_attention(query, k, v, scale=scaling, enable_gqa=True)

        return exact
    call = AttentionCall(query, None, scaling)

    def packed() -> None:
        layer.append(key, value)
        attend_store(layer, call)

    return packed


def medians(
    recipes: Sequence[str], shape: Sequence[int], tokens: int, dtype: torch.dtype, rounds: int, threads: Sequence[int]
) -> dict[int, list[float]]:
    """Return the median microseconds of a step with each cache, over all rounds, by number of threads.

    Each round starts with the same number of tokens.
    """
    layers = [filled(recipe, shape, tokens, dtype) for recipe in recipes]
    found = {}
    for count in threads:
        torch.set_num_threads(count)
        times: list[list[float]] = [[] for _ in recipes]
        for _ in range(rounds):
            for layer, taken in zip(layers, times, strict=True):
                run = step(copy.deepcopy(layer), shape, dtype)
                for i in range(WARM_UP + STEPS):
                    start = time.perf_counter()
                    run()
                    if i >= WARM_UP:
                        taken.append(time.perf_counter() - start)
        found[count] = [statistics.median(taken) * 1e6 for taken in times]
    return found


def main() -> None:
    """Run as described above."""
    parser = recorded.parser(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--compare", choices=COMPARED)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    compared = options.compare and [name for pair in COMPARED[options.compare] for name in pair]
    names = compared or [EXACT, *options.recipes]
    rows: list[dict[str, Any]] = []
    counted = compared or (*options.recipes, *COUNTED)
    for recipe in dict.fromkeys(recipe for recipe in counted if "headkv" not in recipe):  # needs a measured model
        python, native = calls(recipe)
        rows.append({"recipe": recipe, "python_calls": python, "native_calls": native})
    show("calls", ("recipe", "Python calls", "native calls"), (row.values() for row in rows))
    lines = []
    with torch.inference_mode():
        for dtype in options.dtype:
            for shape in SHAPES:
                for tokens in options.tokens or (COMPARED_TOKENS if compared else TOKENS):
                    found = medians(names, shape, tokens, getattr(torch, dtype), options.rounds, options.threads)
                    for threads, each in found.items():
                        where = {"dtype": dtype, "heads": list(shape), "tokens": tokens, "threads": threads}
                        for name, taken in zip(names, each, strict=True):
                            rows.append({"recipe": name, **where, "microseconds": round(taken, 1)})
                        cells = (f"{x:.0f}" for x in each)
                        lines.append([dtype, "/".join(map(str, shape)), f"{tokens:,}", threads, *cells])
    show("microseconds per step of a layer", ("type", "heads", "tokens", "threads", *names), lines)
    record(options.out, {"bench": "layer_step"}, rows)


if __name__ == "__main__":
    main()
