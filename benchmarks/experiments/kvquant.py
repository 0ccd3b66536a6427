"""Experiments of KVQuant (arXiv 2401.18079): questions, and times of thresholds and of calibration."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from experiments.base import MEASURED_DEFAULT, TRAIN, Experiment, Measured, Questions, Result, Setting
from experiments.qjl import plan_of, prompt
from layer_step import step
from recorded import in_turns, median_of
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.calibration.calibrate import Corpus
from tersekv.calibration.gradients import Source, layer_gradients
from tersekv.calibration.text import pydoc_text
from tersekv.codecs.kvquant import build as kvquant
from tersekv.kernels import backends
from tersekv.models.config import attention_layers, text_config
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape, size
from tersekv.transforms.rope import standard_rope

FIRST = "window:sinks=1,recent=0,start=0+"
"""The paper's tokens: the first is exact (§3.5), all others are packed."""
ROWS = {f"nuq{bits}, 1 %": f"{FIRST}kvquant:bits={bits}" for bits in (4, 3, 2)}
ROWS |= {"KIVI, 2 bits": "window:sinks=0,recent=128+kivi:bits=2", "default": MEASURED_DEFAULT}
PACKED = (
    "The whole prompt is read exactly, then packed, then the answer is generated (Appendix M; `--pack after-prompt`). "
    "The authors' script of passkeys quantises while it reads: `--option pack=during-prefill`. The first token is "
    "exact; KIVI keeps its 128 latest tokens."
)
LONGBENCH = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
SHARE = 0.01
SHAPES = {"LLaMA-7B": (4096, 4096, 4096), "SmolLM2": (576, 576, 192)}
"""Hidden size, and channels of queries and of keys (or values) of one layer."""
THREADS = ("1", "2")
REPEATS, ROUND = 300, 30
"""Calls of each row, and those whose median is one value."""
SAMPLES, LENGTH = 16, 2048
LAYER, PIECE = (32, 32, 128), 4096
"""Query heads, key-value heads and head dim of LLaMA-7B, and tokens that are appended at a time."""


def thresholds(setting: Setting) -> list[Result]:
    """Time one token's outlier thresholds, and the projections that they can run next to."""
    found = []
    threads = torch.get_num_threads()
    try:
        for count in setting.values or THREADS:
            torch.set_num_threads(int(count))
            for name, shape in SHAPES.items():
                times = in_turns(_of_one_token(*shape), setting.samples or REPEATS, warm_up=3)
                for row, seconds in times.items():
                    parts = (seconds[i : i + ROUND] for i in range(0, len(seconds), ROUND))
                    rounds = [1e6 * median_of(part) for part in parts]
                    threads_said = f"{count} thread{'s' * (count != '1')}"
                    found.append(Result.of_times(f"{name}, {row}", threads_said, "microseconds", rounds))
    finally:
        torch.set_num_threads(threads)
    return found


def _of_one_token(hidden: int, queries: int, channels: int) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(queries + 2 * channels, hidden, generator=generator)
    x = torch.randn(hidden, generator=generator)
    values = torch.randn(1, channels, generator=generator)
    low, high = (torch.full((channels,), end) for end in (-2.6, 2.6))

    def online() -> Tensor:
        below, above = backends.quantiles(values, SHARE)
        return (values < below[:, None]) | (values > above[:, None])

    return {
        f"thresholds online ({channels:,} values)": online,
        "thresholds offline": lambda: (values < low) | (values > high),
        "projections of Q, K and V": lambda: torch.mv(weights, x),
    }


def calibration(setting: Setting) -> list[Result]:
    """Time the gradients of all samples, and the fit of one layer's keys and values at each width."""
    model, tokenizer = setting.loaded
    text = pydoc_text()
    if setting.data is not None:
        with open(setting.text(TRAIN), encoding="utf-8") as file:
            text = file.read()
    length = min(LENGTH, int(setting.options.get("length", LENGTH)))
    ids = tokenizer(text, verbose=False)["input_ids"]
    corpus = Corpus.draw("text", text, ids, setting.samples or SAMPLES, length, 0)
    layers = [i for i, kind in enumerate(attention_layers(text_config(model.config))) if kind.type == "attention"]
    layer = layers[len(layers) // 2]
    sources = {"keys": Source(layer, "keys", True), "values": Source(layer, "values")}
    start = time.perf_counter()
    kept = [layer_gradients(model, window[None], sources.values(), sinks=1) for window in corpus.windows]
    size = f"{len(kept)} × {length:,} tokens"
    found = [Result(f"gradients of the loss, all layers, {size}", "time", "seconds", time.perf_counter() - start)]
    joined = {
        side: [torch.cat([one[f"{source.name}.{part}"].float() for one in kept], 2) for part in ("x", "gradient")]
        for side, source in sources.items()
    }
    for bits in (4, 3, 2):
        pair = kvquant(bits=bits, outliers=SHARE)
        start = time.perf_counter()
        for codec in (pair.keys, pair.values):
            codec.fit_corpus(*joined[codec.side])
        found.append(Result(f"{bits} bits, one layer", "time", "seconds", time.perf_counter() - start))
    return found


def million(setting: Setting) -> list[Result]:
    """Fill one layer of LLaMA-7B with tokens, and attend to them. Options: `tokens` and `steps`."""
    options = {"tokens": str(2**20), "steps": "5"} | setting.options
    tokens, steps, (_, H, D) = int(options["tokens"]), int(options["steps"]), LAYER
    _, keys, values = prompt(LAYER, PIECE, setting.dtype)
    recipe = ROWS["nuq2, 1 %"]
    empty, rope = keys[:, :, :0], standard_rope(D)
    plan = plan_of(recipe, keys, values)
    store = LayerStore(plan, empty, empty, None, rope)
    query = torch.randn(1, H, 1, D, generator=torch.Generator().manual_seed(1)).to(keys.dtype)
    planted = tokens // 3
    appended = []
    for first in range(0, tokens, PIECE):
        setting.check_time()
        n = min(PIECE, tokens - first)
        cos, sin = rope.cos_sin(first, n, first + n, keys.device)
        own = rope.apply(keys[:, :, :n], cos[None], sin[None])
        if first <= planted < first + n:
            own[:, :, planted - first] = 6 * query[:, :, 0]
        start = time.perf_counter()
        store.append(own, values[:, :, :n])
        appended.append((time.perf_counter() - start) / n)
    held = store.footprint().total_bytes
    shape = CacheShape((None,), H, D, D, keys.dtype, (rope,))
    expected = size(shape, Recipe.parse(recipe), tokens, piece=PIECE).total_bytes
    out = attend_store(store, AttentionCall(query, None, D**-0.5))[:, 0].float()
    block = values[:, :, planted % PIECE // 32 * 32 :][:, :, :32]
    value = plan.values.view(plan.values.encode(block), D).decode()[:, :, planted % 32].float()
    error = float((out - value).norm() / value.norm())
    decode, spent = step(store, LAYER, keys.dtype), []
    for _ in range(steps):
        start = time.perf_counter()
        decode()
        spent.append(1e3 * (time.perf_counter() - start))
    bits = 8 * held / shape.elements(tokens)
    threads = torch.get_num_threads()
    column = f"{tokens:,} tokens"
    found = [
        ("held", "gigabytes", [held / 1e9]),
        ("by estimate", "gigabytes", [expected / 1e9]),
        (f"append, {threads} threads", "microseconds per token", [1e6 * x for x in appended]),
        (f"attend with one query, {threads} threads", "milliseconds", spent),
        ("planted token: output against its packed value", "relative error", [error]),
    ]
    return [
        Result(row, column, metric, median_of(x), None, len(x), len(x), bits, held, recipe) for row, metric, x in found
    ]


EXPERIMENTS: dict[str, Experiment] = {
    "table2": Questions(
        "Table 2: passkey retrieval",
        f"50 samples per length. {PACKED}",
        "Llama-2-7B-32K, 2k to 32k: nuq4-1 % 1.0, nuq3-1 % .98 to 1.0, nuq2-1 % .98 to 1.0, KIVI with 2 bits .68 to "
        ".76.",
        task="passkey",
        options={"pack": "after-prompt"},
        values=("2k", "4k", "8k", "16k", "32k"),
        rows=ROWS,
    ),
    "table2-unseen": Questions(
        "Table 2 with an unknown question",
        "As Table 2, but the context is packed before the question is read.",
        "Not in the paper.",
        task="passkey",
        options={"pack": "before-question"},
        values=("2k",),
        rows=ROWS,
    ),
    "table3": Questions(
        "Table 3: LongBench",
        f"All samples of each set, prompts cut to 31k tokens. {PACKED}",
        "Mean, Llama-2-7B-32K: full cache 31.96, nuq3-1 % 31.21, KIVI with 2 bits 30.04.",
        task="longbench",
        options={"pack": "after-prompt", "length": "31k", "data": "{data}/longbench"},
        axis="subtasks",
        values=LONGBENCH,
        rows=ROWS,
        samples=500,
        mean=True,
    ),
    "table4": Questions(
        "Table 4: RULER",
        f"All 13 tasks at 32k tokens, 500 samples each. {PACKED}",
        "Mean at 32k: full cache 56.40, nuq3-1 % 53.65, KIVI with 2 bits 39.78, nuq2-1 % 36.54.",
        task="ruler",
        options={"pack": "after-prompt", "lengths": "32k", "data": "{data}/ruler"},
        axis="subtasks",
        values=RULER,
        rows=ROWS,
        samples=500,
        mean=True,
    ),
    "table15": Measured(
        "Table 15: time of a token's outlier thresholds",
        "One token's values, 1 % outliers, on the CPU; medians of 300 calls in turns. Online thresholds need the "
        "largest and smallest values; offline ones only compare. The projections are a matrix-vector product in "
        "float32.",
        "LLaMA-7B, A6000 and Xeon Gold 6126: projections of Q, K and V on the GPU .172 ms, top-k on the CPU .026 ms, "
        "both at the same time .173 ms.",
        measure=thresholds,
    ),
    "table16": Measured(
        "Table 16: time of calibration",
        "nuq with 1 % outliers, 16 samples of 2,048 tokens. Gradients are of all layers. Thresholds and k-means are "
        "those of the keys and values of the middle layer.",
        "LLaMA-65B, minutes: Fisher information 2.8 on eight A100; one layer at 4, 3 and 2 bits 4.5, 2.7 and 1.9 on a "
        "Xeon Gold 6442Y.",
        measure=calibration,
    ),
    "million": Measured(
        "One million tokens (abstract, §4.4)",
        "One layer of LLaMA-7B, nuq with 2 bits and 1 % outliers. The same 4,096 random keys and values are appended "
        "again and again, keys with RoPE. One key is the query times 6, so attention must return its value.",
        "LLaMA-7B: one million tokens on an A100 with 80 GB, ten million on eight.",
        measure=million,
    ),
}
