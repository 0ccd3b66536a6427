"""Kernels and whole steps on a GPU: one token's attention, decoding."""

from __future__ import annotations

import statistics

from measured.base import Page, Section, cache, rows
from recorded import Row, markdown
from tersekv.lab.bench.formats import make_segment

GPUS = {"sm_80": "A100", "sm_90": "H100", "sm_120": "RTX 50"}
PACKING = "pack-"
"""Prefix of the kernels that pack in the record of counts."""
TOKENS = 1024
"""Packed tokens of which the bits of a format are counted."""


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
    return markdown(columns, lines)


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
    return markdown(columns, lines)


def counts() -> str:
    """Return the table of counts of loops."""
    fields = "lane_instructions_per_code", "shared", "barriers", "registers", "stack_bytes", "programs"
    columns = (
        "GPU", "format", "lane-instructions per code", "shared accesses", "barriers", "registers", "spilled bytes",
        "programs",
    )  # fmt: skip
    found = [row for row in rows("instructions_gpu.jsonl") if not row["format"].startswith(PACKING)]
    return markdown(columns, [(GPUS[row["target"]], f"`{row['format']}`", *(row[f] for f in fields)) for row in found])


def packing() -> str:
    """Return the table of counts of kernels that pack: one line per kernel, the three GPUs beside each other."""
    by_kernel: dict[str, list[Row]] = {}
    for row in rows("instructions_gpu.jsonl"):
        if row["format"].startswith(PACKING):
            by_kernel.setdefault(row["format"].removeprefix(PACKING), []).append(row)
    fields = "lane_instructions_per_code", "registers", "stack_bytes", "shared_bytes"
    columns = "kernel", "lane-instructions per element", "registers", "spilled bytes", "bytes of shared memory"
    lines = [
        (f"`{name}`", *(" / ".join(f"{row[field]:,g}" for row in found) for field in fields))
        for name, found in by_kernel.items()
    ]
    return markdown(columns, lines)


def predicted() -> str:
    """Return the table of bounds from counts beside what was measured before the last changes."""
    measured = {row["what"]: row["speedup_bfloat16"] for row in rows("attend_gpu.jsonl")}
    lines = []
    for row in rows("instructions_gpu.jsonl"):
        if row["target"] == "sm_90" and "-" not in row["format"].removesuffix("-centred"):
            each = row["lane_instructions_per_code"]
            then = f"{measured[row['format']]:.2f}" if row["format"] in measured else ""
            bits = 8 * make_segment(row["format"], 1, TOKENS, 128, seed=0).bytes / (2 * TOKENS * 128)
            lines.append((f"`{row['format']}`", each, f"{bits:.2f}", f"{min(20 / each, 16 / bits):.1f}", then))
    columns = "format", "lane-instructions per code", "bits per code", "bound, times as fast as bfloat16"
    columns += ("measured, earlier kernels",)
    return markdown(columns, lines)


def page() -> Page:
    """Return the page."""
    attend = rows("attend_gpu.jsonl")[0]
    device = f"{attend['gpu']}, torch {attend['versions']['torch']}, Triton {attend['triton']}"
    return Page(
        "GPU",
        "The first run of Triton's kernels on a GPU, an H100, beside torch's flash attention, and whole steps.",
        f"{device}, random data and weights. **These times are of kernels that were changed because of them.** Grids "
        "now go to the tensor cores without passing through shared memory, entries of tables are loaded where their "
        "places are, a rotated mean is rotated once per tile, "
        "packing a block of trellis codes takes a tenth of the launches, and prompts are packed in larger parts. "
        "The kernels as they were then agreed with torch on the same GPU, as far as its time went. Kernels of grids, "
        "`polar` and `trellis` have changed again and never ran on a GPU. `python "
        "benchmarks/launch_sizes.py` finds the launch sizes of yours: please send the records.",
        (
            Section(
                "Attention of one token",
                "One layer of Llama-3.1-8B's shape: 32 query heads, 8 key-value heads, head dim 128. Each way is a "
                "CUDA graph, and all ways take turns on inputs larger than the cache. The floor is the time to read a "
                "way's bytes as fast as a device copy does. `times as fast` compares with the fastest way in bfloat16, "
                "and `scores` with scores. float8 is our own kernel over float8 tokens.",
                attention(), ["attend_gpu.jsonl"],
                "tersekv bench attend --device cuda --formats all --seconds 2 --limit 1.2 --out FILE",
            ),
            Section(
                "Whole steps and prompts",
                "Random weights of Llama-3.1-8B's config in bfloat16 through transformers, without `torch.compile`, "
                "one round. The host limits the steps, because it launches dozens of kernels per layer, and the first "
                "cache also warms up. So steps cannot be compared, but prompts can: packing took the difference. Today "
                "attention of a layer is three launches, whatever the method: exact tokens and the queries of packed "
                "ones, packed tokens, and one that merges, maps the output back and writes it in the model's type. "
                "The first one also appends the token. "
                "Signs need torch for the sketch of the query, too.",
                decoding(), ["generate_gpu.jsonl"],
                "tersekv bench generate --model config.json --device cuda --dtype bfloat16 --context 8k -r kivi:bits=4 "
                "-r default --prefill-chunk whole --rounds 1 --new-tokens 16 --out FILE",
            ),
            Section(
                "Predicted from counts, not measured",
                "Bounds of today's kernels on an H100 that issues an instruction in every cycle and reads memory at "
                "full speed, whichever takes longer. No kernel can be faster, and look-ups and waits make it slower. "
                "With a GPU, check them in five minutes: `tersekv "
                "bench attend --device cuda --formats all --seconds 2 --limit 1.2 --out FILE`, and open an issue with "
                "the file.",
                predicted(),
            ),
            Section(
                "No package for the kernels hub",
                "transformers' kernels hub registers a function for attention. It gets what the cache returns, and "
                "packed keys and values come from our cache. So `tersekv` must be installed anyway, and a package of "
                "the kernels alone would serve nobody.",
                "",
            ),
            Section(
                "Counts",
                "The loop of today's kernels, compiled by Triton 3.8 for three GPUs (head dim 128, 4 query rows per "
                "head; `-prompt`: for 32 of 512): lane-instructions per code of keys and values, accesses to shared "
                "memory and barriers of a warp per turn, registers and spilled bytes of a thread, and programs that "
                "fit a multiprocessor. An H100 that issues in every cycle reads bfloat16 in the time of 20 "
                "lane-instructions per code. This is a bound, not a speed: the `grid4` of the table above had 6.5, "
                "compiled by Triton 3.6, and conflicts made it slower than bfloat16. Look-ups of `trellis` and "
                "`polar` also wait for the L1 cache: one per code, and 0.56. Look-ups of two codes at once would need "
                "fewer instructions, but tables of 64 cache lines in place of 1 to 4. Latents have 512 channels, 64 "
                "rotated ones and 16 query rows; one code serves as key and value. Their kernels never ran on a GPU. "
                "Integers of `grid4`, `grid2` and latents are subnormal float16 on their way to the tensor cores. "
                "V100, T4 and A100 multiply these exactly (Fasi et al., 2021); no other GPU was tried. Warps of "
                "`grid4` wait for each other once for copies, once for offsets of keys, twice for the largest score, "
                "twice for weights, once for scales of values and twice for their offsets: for data of other warps, "
                "and before the same place is written again.",
                counts(), ["instructions_gpu.jsonl"],
                "python benchmarks/instructions_gpu.py --target sm_90 --out FILE",
            ),
            Section(
                "Counts of packing",
                "Kernels that pack tokens of head dim 128, on A100 / H100 / RTX 50. The 48 bytes of `polar` are no "
                "spills: they are for cosines of angles above 2^31, which do not occur. `signs` per sign of a sketch; "
                "`trellis-search` and `trellis-trace` per component and search, each with one of its rounds of a bit; "
                "`quantiles` per element of a vector of 1,024.",
                packing(), ["instructions_gpu.jsonl"],
            ),
            Section(
                "What did not help",
                "Lane-instructions per code on an H100. `grid4`: one product per slice of codes 3.61 in place of 3.29 "
                "then. Words copied 16 bytes at a time 4.54, because whole tiles then passed through shared memory; "
                "with rows of products in another order they help. Offsets multiplied in four parts of the channels "
                "3.04 in place of 3.13 then, but 20 barriers in place of 12. Offsets in the order of the codes 3.33 "
                "in place of 3.29. Its prompts with 32 rows per program: 10.57 in place of 8.4 then, and 208 bytes "
                "spilled; with 8 warps 21.5. One stage: `turboquant4` 4.20 in place of 4.47, but no words are loaded "
                "ahead. Products of `turboquant4` block by block: 4.39, but 13.3 in place of 7.1 for prompts, and 5.4 "
                "in place of 4.6 on an A100. Its tiles of 256 tokens: 3.10 in place of 3.00 and 160 bytes spilled, "
                "and on an A100 2.97 in place of 3.12 with two programs in place of three. Addresses of blocks "
                "computed per token, where a thread has many: `grid4` 2.69 in place of 2.39, `trellis2` 19.17 in "
                "place of 7.73. `latents-grid4` with 8 warps: 20.1 in place of 14.2 then, without spills; scales with "
                "the products of groups: 19.1 in place of 10.1. `latents-trellis3` with 4 warps: 16.8 in place of "
                "22.3, but 288 bytes spilled. `nuq4-1%` has no spills in tiles of 32 tokens, but 25.1 in place of "
                "19.3, and with 8 warps 27.6; outliers added by blocks of tokens 16.6 in place of 15.1.",
                "",
            ),
        ),
    )  # fmt: skip
