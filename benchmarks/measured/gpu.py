"""Kernels and whole steps on a GPU: one token's attention, launch sizes, decoding."""

from __future__ import annotations

import statistics

from measured.base import Page, Row, Section, cache, rows, table


def attention() -> str:
    """Return the table of one token's attention."""
    lines = [
        (
            f"{row['T']:,}", row["batch"], f"`{row['what']}`" if row["bits"] else row["what"], row["bits"] or "",
            f"{row['median_us']:.1f}", f"{row['p10']:.1f}–{row['p90']:.1f}", f"{row['share_of_floor']:.2f}",
            f"{row['speedup_bfloat16']:.2f}", f"{row['relative_error']:.0e}",
        )
        for row in rows("attend_gpu.jsonl")
    ]  # fmt: skip
    columns = ("tokens", "rows", "way", "bits", "µs", "p10–p90", "share of the floor", "times as fast", "error")
    return table(columns, lines)


def sizes() -> str:
    """Return the table of the fastest launch size of each format."""
    best: dict[str, Row] = {}
    slowest: dict[str, float] = {}
    for row in rows("launch_sizes.jsonl"):
        name, us = row["format"], row["median_us"]
        best[name] = min(best.get(name, row), row, key=lambda one: one["median_us"])
        slowest[name] = max(slowest.get(name, us), us)
    fields = "blocks", "warps", "stages", "programs"
    return table(
        ("format", "blocks of 32 tokens", "warps", "stages", "programs per multiprocessor", "µs", "slowest µs"),
        [
            (f"`{name}`", *(row[field] for field in fields), f"{row['median_us']:.1f}", f"{slowest[name]:.1f}")
            for name, row in best.items()
        ],
    )


def decoding() -> str:
    """Return the table of whole steps and prompts."""
    lines = []
    for row in rows("generate_gpu.jsonl"):
        step, prompt, turn = (statistics.median(row[name]) for name in ("step_ms", "prefill_seconds", "turn_seconds"))
        lines.append(
            (
                cache(row["cache"]), f"{row['context']:,}", f"{step:.1f}", f"{prompt:.2f}", f"{turn:.2f}",
                f"{row['bits_per_element']:.2f}", f"{row['bytes'] / 1e9:.2f}", f"{row['peak_bytes'] / 1e9:.2f}",
            )
        )  # fmt: skip
    columns = ("cache", "context", "ms per token", "prompt s", "512 more s", "true bits", "GB held", "peak GB")
    return table(columns, lines)


def page() -> Page:
    """Return the page."""
    attend = rows("attend_gpu.jsonl")[0]
    device = f"{attend['gpu']}, torch {attend['versions']['torch']}, Triton {attend['triton']}"
    return Page(
        "GPU",
        "Triton kernels on an H100 beside torch's flash attention, and whole steps of a model of 8B parameters.",
        f"{device}. One GPU, one day, random data and weights. `tersekv bench attend --device cuda` and `tersekv bench "
        "generate --device cuda` measure yours. Please send records of other GPUs.",
        (
            Section(
                "Attention of one token",
                "One layer of Llama-3.1-8B's shape: 32 query heads, 8 key-value heads, head dim 128. Each way is a "
                "CUDA graph, and all ways take turns on inputs larger than the cache. The floor is the time to read a "
                "way's bytes as fast as a device copy does. `times as fast` compares with the fastest way in bfloat16. "
                "Rotating queries (`turboquant`) is not timed.",
                attention(), ["attend_gpu.jsonl"],
                "tersekv bench attend --device cuda --formats all --batch 1,8 --out FILE",
            ),
            Section(
                "Launch sizes",
                "The fastest of up to 36 sizes of each format at 32,768 tokens, which the library uses on this GPU, "
                "and the slowest that ran.",
                sizes(), ["launch_sizes.jsonl"], "python benchmarks/launch_sizes.py --out FILE",
            ),
            Section(
                "Whole steps and prompts",
                "Random weights of Llama-3.1-8B's config in bfloat16 through transformers, without `torch.compile`. At "
                "these contexts a step is bound by the host, which launches some 50 kernels per layer, so a faster "
                "attention hardly shows. The host of this machine was slow.",
                decoding(), ["generate_gpu.jsonl"],
                "tersekv bench generate --model config.json --device cuda --dtype bfloat16 --context 8k -r kivi:bits=4 "
                "-r default --prefill-chunk whole --rounds 1 --new-tokens 16 --out FILE",
            ),
        ),
    )  # fmt: skip
