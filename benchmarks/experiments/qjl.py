"""Experiments of QJL (arXiv 2406.03482)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import DynamicLayer

from experiments.base import MEASURED_DEFAULT, Experiment, Measured, OutOfTimeError, Questions, Result, Setting
from layer_step import EXACT, step
from tersekv.cache.layer import LayerStore
from tersekv.recipe import LayerPlan, Recipe
from tersekv.transforms.rope import standard_rope
from tersekv.units import parse_tokens

LATEST = "window:sinks=0,recent=128+"
"""The authors' tokens: the 128 latest are exact, all others are packed."""
PREFIX = {"text": "{data}/wikitext-2/test_gptq_joined.txt", "mode": "cache", "context": "2304", "chunk": "64"}
"""A text of 2,048 tokens is packed, and the next 256 are scored; with 4 sinks and 128 recent tokens exact."""
PACKED = (
    "wikitext-2 test: 2,048 tokens are read exactly and packed, the next 256 are scored. Four sinks and the latest 128 "
    "to 159 tokens are exact and count as bits."
)

SHAPES = {
    "SmolLM2": (9, 3, 64), "Qwen2.5": (14, 2, 64), "Gemma 3": (4, 1, 256), "8B": (32, 8, 128)
}  # fmt: skip
"""Query heads, key-value heads and head dim of the timed layers."""
TIMED = {
    EXACT: EXACT,
    "exact, our kernels": "exact:dtype=bf16",
    "QJL": f"{LATEST}qjl",
    "KIVI, 2 bits": f"{LATEST}kivi:bits=2",
    "KVQuant, 4 bits, 1 %": "window:sinks=1,recent=0,start=0+kvquant:bits=4",
    "default": MEASURED_DEFAULT,
}
CALIBRATION_TOKENS = 512
WARM_UP_TOKENS = 256


def plan_of(recipe: str, keys: Tensor, values: Tensor) -> LayerPlan:
    """Return the plan of a later layer, calibrated on the given tokens if it needs a corpus."""
    plan = Recipe.parse(recipe).plan(20, 32)
    sides = {"keys": keys.float(), "values": values.float()}
    fitted = {
        side: getattr(plan, side).fit_corpus(x, torch.ones_like(x))
        for side, x in sides.items()
        if getattr(plan, side).needs_fit == "corpus"
    }
    return plan._replace(**fitted)


def packed_layer(plan: LayerPlan | None, keys: Tensor, values: Tensor) -> Any:
    """Return a layer with these tokens: a packed store, or transformers' own without a plan."""
    if plan is None:
        layer = DynamicLayer()
        layer.update(keys, values)
        return layer
    store = LayerStore(plan, keys[:, :, :0], values[:, :, :0], None, standard_rope(keys.shape[-1]))
    store.append(keys, values)
    return store


def milliseconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the time of a call in milliseconds, and its result."""
    start = time.perf_counter()
    made = run()
    return (time.perf_counter() - start) * 1e3, made


def layer_times(setting: Setting) -> list[Result]:
    """Time reading a prompt and decoding after it in one attention layer with each cache, in turns.

    Options: `rounds`, and `steps`, the number of decoded tokens.
    """
    options = {"rounds": "5", "steps": "64"} | setting.options
    rounds, steps = int(options["rounds"]), int(options["steps"])
    lengths = [(text, parse_tokens(text)) for text in setting.values or ("1k", "2k", "4k", "8k", "16k")]
    found: list[Result] = []
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            name = f"{name} ({'/'.join(map(str, shape))})"
            plans: dict[str, LayerPlan | None] = {}
            for label, recipe in setting.chosen(TIMED).items():
                _, keys, values = prompt(shape, CALIBRATION_TOKENS, setting.dtype)
                plans[label] = None if label == EXACT else plan_of(recipe, keys, values)
            one_length(plans, shape, WARM_UP_TOKENS, setting.dtype, 1, 1)
            for text, tokens in lengths:
                try:
                    setting.check_time()
                except OutOfTimeError:
                    print(f"out of time before {name} at {text}")
                    return found
                print(f"{name}, {text}", flush=True)
                for label, (encode, decode, held) in one_length(
                    plans, shape, tokens, setting.dtype, rounds, steps
                ).items():
                    bits = held * 8 / (2 * shape[1] * (tokens + steps + 1) * shape[2])
                    for metric, taken in (("read the prompt", encode), ("decode a token", decode)):
                        threads = torch.get_num_threads()
                        what = f"ms to {metric}, one layer, {name}, {threads} thread{'s' * (threads > 1)}"
                        of_cache = {"bits": bits, "bytes": held, "recipe": TIMED[label]}
                        found.append(Result.of_times(label, text, what, taken, **of_cache))
    return found


def prompt(shape: tuple[int, int, int], tokens: int, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, keys and values of a prompt. Every ninth key channel is an outlier."""
    Hq, H, D = shape
    made = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, H, tokens, D, generator=made)
    keys[..., ::9] *= 6
    queries = torch.randn(1, Hq, tokens, D, generator=made)
    queries, keys, values = (x.to(getattr(torch, dtype)) for x in (queries, keys, values))
    return queries, keys, values


def one_length(
    plans: dict[str, LayerPlan | None], shape: tuple[int, int, int], tokens: int, dtype: str, rounds: int, steps: int
) -> dict[str, tuple[list[float], list[float], int]]:
    """Return, per cache, milliseconds to read the prompt and per decoded token in each round, and its bytes.

    Causal attention over the prompt is the same for all caches. It is timed once per round and added to the time in
    which the layer packs the prompt.
    """
    queries, keys, values = prompt(shape, tokens, dtype)
    times: dict[str, tuple[list[float], list[float], int]] = {label: ([], [], 0) for label in plans}
    for _ in range(rounds):
        attention, _ = milliseconds(
            lambda: scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        )
        for label, plan in plans.items():
            packing, layer = milliseconds(lambda plan=plan: packed_layer(plan, keys, values))
            decode = step(layer, shape, getattr(torch, dtype))
            decode()
            spent, _ = milliseconds(lambda decode=decode: [decode() for _ in range(steps)])
            held = 2 * layer.keys.nbytes if plan is None else layer.footprint().total_bytes
            times[label][0].append(attention + packing)
            times[label][1].append(spent / steps)
            times[label] = (*times[label][:2], held)
    return times


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Questions(
        "Table 1: LongBench, question answering",
        "Prompts cut to 31k tokens, token F1. The whole prompt is read exactly, then packed, then the answer is "
        "generated (`--pack after-prompt`). The 128 latest tokens are exact. multifieldqa_zh is Chinese and not run.",
        "longchat-7b, F1 of narrativeqa, qasper, multifieldqa_en, multifieldqa_zh, hotpotqa, 2wikimqa: QJL at 3 bits "
        "21.83, 29.44, 41.52, 34.42, 35.62, 23.60; full cache 20.79, 29.42, 42.83, 34.33, 33.05, 24.14.",
        task="longbench",
        options={"pack": "after-prompt", "length": "31k", "data": "{data}/longbench"},
        axis="subtasks",
        values=("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa"),
        rows={"QJL": f"{LATEST}qjl", "KIVI, 2 bits": f"{LATEST}kivi:bits=2", "default": MEASURED_DEFAULT},
        samples=200,
        mean=True,
    ),
    "ablations": Questions(
        "Ablations: rows of the sketch, outlier channels, first layers",
        f"{PACKED} M is the number of rows of the sketch. The first 15 layers have twice as many, and half the rows "
        "for outliers: 15 of the authors' 32 layers, of SmolLM2's 30, of Qwen2.5's 24 and of Gemma 3's 18. Sizes are "
        "given for head dim 64, where M is 128 by default. M = 750 without outlier channels, all layers alike, is a "
        "setting for wide heads (Gemma's have 256 channels).",
        "Orthogonal rows “almost always” improve QJL (§4.1, no figures). The first layers have no outlier channels, "
        "deep layers about four (Fig. 2).",
        task="divergence",
        options=PREFIX,
        axis="prefix",
        values=("2048",),
        rows={
            "QJL: orthogonal rows, 8 outliers, M = 2·D, 15 first layers": "qjl",
            "i.i.d. rows": "qjl:orthogonal=false",
            "no outliers": "qjl:outliers=0",
            "no outliers, M = 4·D": "qjl:outliers=0,sketch=256",
            "4 outliers": "qjl:outliers=4",
            "outliers per 32 tokens": "qjl:outliers_per=group",
            "all layers alike": "qjl:initial_layers=0",
            "M = 4·D": "qjl:sketch=256",
            "M = 6·D": "qjl:sketch=384",
            "M = 8·D": "qjl:sketch=512",
            "no outliers, M = 750, all layers alike": "qjl:outliers=0,sketch=750,initial_layers=0",
            "M = 4·D, all layers alike": "qjl:sketch=256,initial_layers=0",
            "M = 6·D, all layers alike": "qjl:sketch=384,initial_layers=0",
            "M = 8·D, all layers alike": "qjl:sketch=512,initial_layers=0",
            "values with 4 bits": "qjl:value_bits=4",
            "values with 4 bits, M = 8·D, all layers alike": "qjl:sketch=512,initial_layers=0,value_bits=4",
        },
        samples=8,
        count="windows",
        metrics=("kl", "perplexity_ratio"),
    ),
    "like-for-like": Questions(
        "Like for like: QJL and others at 3 true bits",
        f"{PACKED} Recipes are chosen by their bits without exact tokens at head dim 64: QJL, KIVI and TurboQuant at "
        "3.00, PolarQuant with the full recursion and the default at 3.25 and 3.24. QJL's rows are divided between "
        "ordinary and outlier channels in five ways.",
        "QJL and KIVI “at 3 bits”, LongBench F1 (Table 1). The setting of the authors' code holds 3.87 bits on 32 "
        "layers.",
        task="divergence",
        options=PREFIX,
        axis="prefix",
        values=("2048",),
        rows={
            "QJL as published": "qjl",
            **{
                f"QJL, 3.00 bits, rows {M} + {of_outliers}": (
                    f"qjl:sketch={M},outlier_sketch={of_outliers},initial_layers=0"
                )
                for M, of_outliers in ((128, 32), (96, 64), (64, 96), (48, 112))
            },
            "QJL, 3.00 bits, no outliers": "qjl:outliers=0,sketch=176,initial_layers=0",
            "KIVI, 3.00 bits": "kivi:bits=2",
            "TurboQuant, 3.00 bits": "turboquant:bits=2.5",
            "TurboQuant, 3.25 bits": "turboquant:bits=3",
            "PolarQuant, full recursion": "polarquant:bits=4-2-2-2-2-2",
            "PolarQuant": "polarquant",
            "PolarQuant, not rotated": "polarquant:rotation=none",
            "PolarQuant, online": "polarquant:codebook=online",
            "KIVI, 5.00 bits": "kivi:bits=4",
            "default": MEASURED_DEFAULT,
            "trellis, 2 bits": "trellis:bits=2,calibration=prompt",
        },
        samples=8,
        count="windows",
        metrics=("kl", "perplexity_ratio"),
    ),
    "figure3": Measured(
        "Figure 3: time to read a prompt and to decode in one attention layer",
        "Random queries, keys and values, outliers in every ninth key channel. Reading the prompt is causal attention "
        "plus packing. This attention is the same for all caches and timed once per round. A decode step appends a "
        "token and attends to all. 64 steps, with the packing that they cause, are averaged. All caches take turns; "
        "medians of the rounds. KVQuant is calibrated before. `exact` is transformers' own cache, which copies and "
        "widens all keys at every step, `exact, our kernels` 16-bit tokens read like packed ones.",
        "A figure without numbers, 1k to 128k tokens, one A100. KIVI and QJL at 3 bits hardly slow the prompt and "
        "decode faster than the full cache. KVQuant is slower at both.",
        measure=layer_times,
    ),
}
