"""Prompts, second turns, steps and memory, measured with a whole model."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from measured.base import Page, Row, Section, cache, cpu, middle, model, rows, span
from recorded import markdown

RUNS = tuple(f"generate{kind}" for kind in ("", "_amx", "_amx167", "_avx2", "_icelake", "_skylake", "_zen4", "_zen5"))
THREE_BITS = "trellis, 3 bits"
"""The recipe that records of that time name `default`."""


class Decoding(NamedTuple):
    """A row of `tersekv bench generate` with the full cache's row of the same run.

    about: first cells of a table. steps: milliseconds per round.
    """

    run: str
    about: tuple[str, str, str, str]
    row: Row
    full: Row
    steps: list[float]


BUSY = ", busy"
"""Ends the CPU's name in rows of runs beside other work."""


def decodings() -> list[Decoding]:
    """Return the rows of all runs, by CPU, the newest first, then by model, dtype and tokens."""
    found = sorted(unsorted_decodings(), key=lambda one: (one.about[1], one.row.get("context") or one.row["depth"]))
    return sorted(found, key=lambda one: (one.about[0].removesuffix(BUSY), BUSY not in one.about[0]), reverse=True)


def unsorted_decodings() -> Iterator[Decoding]:
    """Yield the rows of all runs, with the full cache's row of the same setting."""
    for run in RUNS:
        fulls: dict[tuple[str, ...], Row] = {}
        for row in rows(f"{run}.jsonl"):
            dtype, chunk = row.get("dtype", "float32"), row.get("prefill_chunk")
            tokens = f"{row.get('context') or row['depth']:,}" + (f", chunks of {chunk}" if chunk else "")
            busy = BUSY if "beside" in row else ""
            about = cpu(row) + busy, f"{model(row)}, {dtype}", tokens
            full = fulls.setdefault(about, row)
            yield Decoding(run, (*about, cache(row["cache"])), row, full, steps(row))


def steps(row: Row) -> list[float]:
    """Return the milliseconds per token in each round."""
    return row["step_ms"] if "step_ms" in row else [1e3 / rate for rate in row["rates"]]


def times(values: list[float], full: list[float], digits: int = 2) -> str:
    """Return values in multiples of the full cache's in the same round: least and most, after the median of several."""
    ratios = [a / b for a, b in zip(values, full, strict=True)]
    ends = span(ratios, digits)
    return ends if len(ratios) < 3 else f"{statistics.median(ratios):.{digits}f}; {ends}"


def prompts() -> str:
    """Return the table of times to read a prompt, and a second turn."""
    lines = []
    for one in decodings():
        if "prefill_seconds" not in one.row:
            continue
        cells = []
        for name in ("prefill_seconds", "turn_seconds"):
            taken = one.row.get(name)
            ratio = f" ({times(taken, one.full[name])})" if taken and one.row is not one.full else ""
            cells.append(f"{middle(taken)}{ratio}" if taken else "–")
        lines.append((*one.about, *cells, one.run.removeprefix("generate_")))
    return markdown(("CPU", "model", "tokens", "cache", "prompt, s", "turn, s", "run"), lines)


def decode_steps() -> str:
    """Return the table of times per decoded token."""
    lines = [
        (*one.about, middle(one.steps), times(steps(one.full), one.steps), one.run.removeprefix("generate_"))
        for one in decodings()
    ]
    return markdown(("CPU", "model", "tokens", "cache", "step, ms", "times as fast", "run"), lines)


def memory() -> str:
    """Return the table of bytes held, and the growth of the process in a whole run."""
    lines = []
    for one in decodings():
        held, peak = one.row["bytes"], one.row["peak_bytes"]
        known = [f"{held / 1e6:.0f}", f"{peak / held:.1f}"] if held else ["–", "–"]
        cells = [known[0], f"{peak / 1e6:,.0f}", known[1]]
        lines.append((*one.about[1:], *cells, one.run.removeprefix("generate_")))
    return markdown(("model", "tokens", "cache", "held, MB", "peak, MB", "peak / held", "run"), lines)


def agreement() -> str:
    """Return the table of the program `decode.py agreement`, whose runs repeat the same sizes."""
    found = rows("main_job.jsonl")
    first = next(row for row in found if row["what"] == "agreement")
    parts = first["bytes_by_part"]
    named = ", ".join(
        f"{name} {parts[name] / 1e6:.2f}" for name in sorted(parts, key=parts.get, reverse=True) if parts[name] >= 1e4
    )
    lines = [
        ("share of bfloat16's bytes after 4,096 + 64 tokens", f"{first['share_of_bf16']:.3f}"),
        ("bits per number of keys and values", f"{first['bits_per_element']:.2f}"),
        ("MB by part", named),
        ("equal first tokens of 64, ten prompts", ", ".join(map(str, first["common_prefix"]))),
    ]
    for row in (row for row in found if row["what"] == "decode speed"):
        rates = [middle(row[f"{name}_tokens_per_second"]) for name in ("packed", "full")]
        lines.append((f"tokens/s at 8,000 tokens, packed / full, {len(row['ratios'])} rounds", " / ".join(rates)))
        lines.append(("… times as fast", f"{row['ratio']:.2f} ({span(row['ratios'])})"))
    return markdown(("figure", "`kivi:bits=4`"), lines)


def compiled() -> str:
    """Return the table of stock `generate`, eager and compiled."""
    names = {"dynamic": "transformers' own", "static": "transformers' own", "default": THREE_BITS}
    lines = []
    for row in rows("compiled.jsonl"):
        name = names.get(row["cache"], f"`{row['cache']}`")
        same = "all" if row["equal_tokens"] == 67 else str(row["equal_tokens"])
        spent = "–" if row["compile_seconds"] is None else f"{row['compile_seconds']:.1f}"
        rate = f"{row['tokens_per_second']:.1f} ({span(row['rates'], 1)})"
        lines.append((row["dtype"], f"{row['depth']:,}", name, row["mode"], rate, same, spent))
    return markdown(("dtype", "tokens", "cache", "mode", "tokens/s", "tokens equal to eager", "compiling, s"), lines)


def llama() -> str:
    """Return the table of llama.cpp's caches."""
    lines = []
    for row in rows("llama_attention.jsonl"):
        adds = [far - near for near, far in zip(row["ms_near"], row["ms_far"], strict=True)]
        name = {"default": THREE_BITS, "full": "transformers' own"}.get(row["cache"], row["cache"])
        name = f"`{name}`" if ":" in name else name
        lines.append((name, f"{row['ms_of_cache']:.0f} ({span(adds, 0)})"))
    return markdown(("cache", "ms that 8,000 tokens add to a step"), lines)


PREFILLS = {"Zen 5": "prefill_zen5.jsonl", "Zen 4": "prefill_zen4.jsonl"}


def shares() -> str:
    """Return the table of the time within the cache's layers in a whole prefill."""
    lines = []
    for kind, row in ((kind, row) for kind, name in PREFILLS.items() for row in rows(name)):
        if row["recipe"] != "full":
            share = f"{row['share']:.3f} ({span(row['share_range'], 3)})"
            ranking = f"{row['ranking_share']:.3f}" if "ranking_share" in row else "–"
            lines.append((kind, f"`{row['recipe']}`", share, ranking, f"{row['times_full']:.2f}"))
    return markdown(("CPU", "recipe", "packing / rest", "ranking / rest", "times the full cache's time"), lines)


def calibrated(recipe: str) -> str:
    """Return a recipe of prefill.jsonl, in which the presets were `trellis` with a calibration on a corpus."""
    names = {"default": "`trellis:bits=3`, calibrated", "safe": "`trellis:bits=4`, calibrated"}
    return names.get(recipe, f"`{recipe}`")


def packing_memory() -> str:
    """Return the table of peaks while prompts are packed, without a model."""
    found = [row for row in rows("prefill.jsonl") if row["what"] == "memory"]
    return markdown(
        ("recipe", "held, MB", "peak, MB", "peak / held"),
        [(calibrated(row["recipe"]), row["held_mb"], row["peak_mb"], f"{row['peak_over_held']:.2f}") for row in found],
    )


def packing_note() -> str:
    """Return a sentence about the smaller parts of prefill.jsonl."""
    found = {row["what"]: row for row in rows("prefill.jsonl")}
    block, large = found["block"], found["estimate"]
    return (
        f"a block of 32 tokens of one layer takes {block['ms']:.2f} ms with 3 bits of trellis; a decode step encodes "
        "those of all layers in a few calls. "
        f"An estimate for {large['parameters'] / 1e9:.0f} billion parameters, {large['layers']} layers and "
        f"{large['kv_heads']} KV heads of {large['head_dim']} is {large['share']:.3f} of a prefill: it scales "
        "SmolLM2's prefill by parameters and counts no attention."
    )


def page() -> Page:
    """Return the page."""
    files = [f"{run}.jsonl" for run in RUNS]
    command = (
        "tersekv bench generate --model MODEL --recipe default --recipe kivi:bits=4 --dtype float32,bfloat16 "
        "--context 1k,4k,8000 --prefill-chunk whole,512 --out FILE"
    )
    return Page(
        "Speed and memory with a model",
        "Time to read a prompt, a second turn, a step and peak memory, by CPU kind, model, length and cache.",
        "Two threads, caches in turns in one process, medians of 2 to 9 rounds. The machines were shared, so times of "
        "different runs cannot be compared. Ratios can: they are of the same round, least and most, after the median "
        "of three and more. `trellis:bits=3,calibration=prompt` was the preset `default` in the earlier runs, before "
        "its packing became faster. The presets code Gemma 3 as `kivi:bits=4` where a prompt has less than 4,096 "
        "tokens or is read in chunks, so such rows differ by chance.",
        (
            Section(
                "A prompt and a second turn",
                "In brackets: multiples of the full cache's time, so below 1 is faster. A turn is 512 tokens after the "
                "prompt, which packed caches read with a kernel of ours. In rows with `busy` two other processes "
                "computed without end, and every parallel operation of torch waited for a core.",
                prompts(), files[1:], command,
            ),
            Section(
                "A step",
                "Milliseconds per token, and multiples of the full cache's speed. quanto and HQQ are the back ends of "
                "transformers' `QuantizedCache`. In float32 at 1,024 tokens packing is not faster, because "
                "attention is a small part of a step. A step is the mean over 32 tokens, of which one packs a block in "
                "all layers; over 16 in the runs `amx`, `zen4` and `zen5`, of which it is one or none.\n\n"
                "![Time per token by length](step.svg)",
                decode_steps(), files, command,
            ),
            Section(
                "Memory",
                "Held: all bytes of the cache. Peak: growth of the process in a whole run, activations of the prompt "
                "included where the run read it itself; the run `generate` filled packed caches from one prefill.",
                memory(), files, command,
            ),
            Section(
                "Size and agreement of one recipe",
                "SmolLM2-135M, float32, Zen 5, greedy, texts of Python's documentation. Sizes and tokens repeat "
                "exactly; speeds are of three runs on a shared machine.",
                agreement(), ["main_job.jsonl"], "python benchmarks/decode.py agreement --out FILE",
            ),
            Section(
                "Compiled steps",
                "SmolLM2-135M in stock `generate`, two threads of Zen 4, 3 rounds of 64 tokens. Compiled is inductor, "
                "with `StaticCache` for transformers. In bfloat16 inductor rounds elsewhere, so tokens part.",
                compiled(), ["compiled.jsonl"], "python benchmarks/decode.py compiled --rounds 3 --out FILE",
            ),
            Section(
                "Beside llama.cpp",
                "SmolLM2-135M, one thread of Zen 4, 16 tokens, median and range of 3 rounds. llama.cpp has 4-bit "
                "weights and flash attention; ours has float32 weights in transformers, whose own steps are included.",
                llama(), ["llama_attention.jsonl"],
                "python benchmarks/decode.py llama --gguf FILE.gguf --depths 8000 --threads 1 --rounds 3",
            ),
            Section(
                "Share of packing in a prefill",
                "SmolLM2-135M, bfloat16, two threads, prompts of 4,096 tokens read whole; medians of 3 rounds. The "
                "rest is the model, its attention included, which packed caches do with a kernel of ours. On Zen 4: "
                f"{packing_note()}",
                shares(), [*PREFILLS.values(), "prefill.jsonl"],
                "python benchmarks/prefill.py --parts prefill --dtypes bfloat16 --out FILE",
            ),
            Section(
                "Peak while packing",
                "30 layers of 3 KV heads of 64 channels pack 4,096 tokens, without a model. No other layer's exact "
                "keys are alive, and freed blocks are returned to the system after each layer.",
                packing_memory(), ["prefill.jsonl"], "python benchmarks/prefill.py --parts memory --out FILE",
            ),
        ),
    )  # fmt: skip
