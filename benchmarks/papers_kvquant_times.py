"""KVQuant's times of thresholds and of calibration (arXiv 2401.18079, Tables 15 and 16)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from experiment import TRAIN, Experiment, Measured, Result, Setting, median_of
from tersekv.calibration.calibrate import Corpus
from tersekv.calibration.gradients import Source, layer_gradients
from tersekv.calibration.text import pydoc_text
from tersekv.codecs.kvquant import build as kvquant
from tersekv.kernels import backends
from tersekv.models.config import attention_layers, text_config

SHARE = 0.01
SHAPES = {"LLaMA-7B": (4096, 4096, 4096), "SmolLM2": (576, 576, 192)}
"""Hidden size, and channels of queries and of keys (or values) of one layer."""
THREADS = ("1", "2")
REPEATS = 300
SAMPLES, LENGTH = 16, 2048


def thresholds(setting: Setting) -> list[Result]:
    """Time one token's outlier thresholds, and the projections that they can run next to."""
    found = []
    threads = torch.get_num_threads()
    try:
        for count in setting.values or THREADS:
            torch.set_num_threads(int(count))
            for name, shape in SHAPES.items():
                times = _in_turns(_of_one_token(*shape), setting.samples or REPEATS)
                found += [
                    Result(
                        f"{name}, {row}",
                        f"{count} thread{'s' * (count != '1')}",
                        "microseconds",
                        1e6 * median_of(seconds),
                    )
                    for row, seconds in times.items()
                ]
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


def _in_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each call; functions take turns, so that load of the machine falls on all."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 3):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn >= 3:  # the first calls warm caches
                times[name].append(time.perf_counter() - start)
    return times


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


EXPERIMENTS: dict[str, Experiment] = {
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
}
