"""Kernels and single layers: attention over packed tokens, steps of a layer, encoders, instructions."""

from __future__ import annotations

from collections.abc import Iterable

from measured.base import Page, Row, Section, cpu, rows, span
from measured.speed import THREE_BITS
from recorded import markdown

FILES = (
    "bench_attend_zen5.jsonl",
    "bench_attend.jsonl",
    "bench_attend_amx167.jsonl",
    "bench_attend_skylake.jsonl",
    "bench_attend_avx2.jsonl",
    "bench_shapes.jsonl",
    "bench_outliers.jsonl",
)


def attention_rows() -> Iterable[tuple[Row, float]]:
    """Yield the rows of `tersekv bench attend`, and how many times as fast as the faster dense product each is."""
    found = [row for name in FILES for row in rows(name)]
    dense: dict[tuple[object, ...], float] = {}
    for row in found:
        if row["what"].startswith("matmul"):
            at = cpu(row), row["shape"], row["T"], row["threads"]
            dense[at] = min(dense.get(at, row["median_us"]), row["median_us"])
    for row in found:
        yield row, dense[cpu(row), row["shape"], row["T"], row["threads"]] / row["median_us"]


def attention() -> str:
    """Return the table of one token's attention."""
    lines = []
    for row, ratio in attention_rows():
        about = cpu(row), row["shape"], f"{row['T']:,}", row["threads"]
        lines.append((*about, f"`{row['what']}`", f"{row['median_us'] / 1e3:.2f}", f"{ratio:.1f}"))
    return markdown(("CPU", "heads", "tokens", "threads", "format", "ms", "times as fast"), lines)


def reading(run: str) -> str:
    """Return times of formats in multiples of the time to read their bytes, of a run of `tersekv bench attend`."""
    found = [
        (row["read_gb_per_s"] / row["gb_per_s"], row["what"])
        for row in rows(f"bench_attend_{run}.jsonl")
        if (row["shape"], row["T"], row["threads"]) == ("32/8/128", 32768, 1)
        and "bfloat" not in row["what"]
        and "float32" not in row["what"]
    ]
    return ", ".join(f"`{what}` {ratio:.1f}" for ratio, what in sorted(found))


def heads(row: Row) -> str:
    """Return query heads, KV heads and head dim."""
    return "/".join(map(str, row["heads"]))


def layer_step() -> str:
    """Return the table of a step of one layer."""
    found = [row for row in rows("layer_step.jsonl") if "microseconds" in row]
    exact = {(r["dtype"], heads(r), r["tokens"]): r["microseconds"] for r in found if r["recipe"] == "exact"}
    lines = []
    for row in found:
        name = THREE_BITS if row["recipe"] == "default" else f"`{row['recipe']}`"
        ratio = exact[row["dtype"], heads(row), row["tokens"]] / row["microseconds"]
        lines.append(
            (row["dtype"], heads(row), f"{row['tokens']:,}", name, f"{row['microseconds']:,.0f}", f"{ratio:.1f}")
        )
    return markdown(("dtype", "heads", "tokens", "recipe", "µs", "times as fast as `exact`"), lines)


def calls() -> str:
    """Return the table of calls of a layer's step."""
    found = [row for row in rows("layer_step.jsonl", "mixed_step.jsonl") if "python_calls" in row]
    named = [(THREE_BITS if row["recipe"] == "default" else f"`{row['recipe']}`", row) for row in found]
    return markdown(
        ("recipe", "Python calls", "native calls"),
        [(name, f"{row['python_calls']:.0f}", f"{row['native_calls']:.0f}") for name, row in named],
    )


def compared(record: str, policy: str) -> str:
    """Return the table of a policy beside another one with the same codecs: pairs of recipes in their order."""
    found: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows(record):
        if "microseconds" in row:
            at = row["dtype"], heads(row), f"{row['tokens']:,}", row["threads"]
            found.setdefault(at, {})[row["recipe"]] = row["microseconds"]
    names = list(dict.fromkeys(name for cells in found.values() for name in cells))
    second = {codec_of(name): name for name in names if name.startswith(policy)}
    pairs = [(name, second[codec_of(name)]) for name in names if not name.startswith(policy)]
    lines = [
        (*at, *(f"{cells[one]:,.0f} / {cells[two]:,.0f} = {cells[two] / cells[one]:.2f}" for one, two in pairs))
        for at, cells in found.items()
    ]
    columns = (f"`{one.split('+')[-1].split(',')[0]}`" for one, _ in pairs)
    return markdown(("dtype", "heads", "tokens", "threads", *columns), lines)


def codec_of(recipe: str) -> str:
    """Return the name of a recipe's codec."""
    return recipe.split("+")[-1].split(":")[0]


def encoding() -> str:
    """Return the table of packing a prompt, with the kernels and with torch alone.

    The run with two threads was before the kernels, so its rows are of torch alone without saying so.
    """
    alone, lines = " (torch alone)", {}
    for row in rows("encode.jsonl"):
        if "prefill" not in row["what"]:
            cells = lines.setdefault((row["threads"], row["what"].removesuffix(alone)), ["–", "–"])
            at = 1 if row["what"].endswith(alone) or row["threads"] == 2 else 0
            cells[at] = f"{row['ratio_to_prefill']:.3f} ({span(row['ratio_range'], 3)})"
    columns = ("threads", "recipe", "with the kernels", "torch alone")
    return markdown(columns, [(threads, f"`{what}`", *cells) for (threads, what), cells in lines.items()])


def instructions() -> str:
    """Return the table of instructions per token and KV head."""
    found = {(row["kind"], row["what"], row["isa"]): row["per_token_and_head"] for row in rows("instructions.jsonl")}
    kinds = {"attend": "attention", "encode": "encoder", "search": "encoder"}
    names = dict.fromkeys((kind, what) for kind, what, _ in found)
    lines = [
        (kinds[kind], f"`{what}`", *(f"{found[kind, what, isa]:,.0f}" for isa in ("avx2", "scalar")))
        for kind, what in names
    ]
    return markdown(("kind", "kernel", "AVX2", "portable build"), lines)


def page() -> Page:
    """Return the page."""
    return Page(
        "Kernels",
        "Attention over packed tokens beside PyTorch's dense ways, steps of one layer, encoders, and instructions.",
        "Synthetic keys and values, all ways in turns, medians. Outputs are compared with a reference before "
        "anything is timed. Heads are query heads / KV heads / head dim. [GPU](gpu.md) has Triton's kernels.",
        (
            Section(
                "Attention of one token",
                "The dense product is the faster of two batched matmuls over the query group, with which the last "
                "column compares. `grid4` is KIVI's layout with 4 bits, `qjl256` sketches of 256 rows and 4-bit "
                "values, `nuq4-1%` KVQuant with 1 % outliers, `trellis2-centred` keys without their mean, as the "
                "presets have them. The dense product is bound by memory and the kernels by products, so ratios "
                "depend on free bandwidth. Times in multiples of the time to read the packed bytes, one thread, "
                f"32/8/128, 32,768 tokens. Zen 5: {reading('zen5')}. Xeon with AMX, model 167: {reading('amx167')}."
                "\n\n![Attention of one token over 32,768 tokens](kernels.svg)",
                attention(), FILES,
                "tersekv bench attend --tokens 1k,8k,32k --heads 32/8/128,9/3/64 --threads 1,2 --out FILE",
            ),
            Section(
                "A step of one layer",
                "Append one token to one layer and attend: one thread of Zen 4, 9 rounds of 64 steps. `exact` is "
                "transformers' `DynamicLayer` with torch's `scaled_dot_product_attention`.",
                layer_step(), ["layer_step.jsonl"], "python benchmarks/layer_step.py --out FILE",
            ),
            Section(
                "Calls of a step",
                "Python calls in files of tersekv and calls of its extension, per layer. `turboquant:bits=2.5` builds "
                "its kernel arguments at each step, because its linear map differs between heads.",
                calls(), ["layer_step.jsonl", "mixed_step.jsonl"], "python benchmarks/layer_step.py --out FILE",
            ),
            Section(
                "Two rates beside equal rates",
                "The same step with `mixed:budget=0.25,rest=2` and 4 bits: equal rates / two rates = ratio, µs. Zen 4, "
                "7 rounds. With `kivi` and `turboquant`, two rates have half a bit more.",
                compared("mixed_step.jsonl", "mixed"), ["mixed_step.jsonl"],
                "python benchmarks/layer_step.py --compare mixed --threads 1 4 --tokens 8192 32768 --out FILE",
            ),
            Section(
                "Heads with different numbers of tokens",
                "The same step with heads that keep a quarter of the tokens each (`snapkv`) / on average (`headkv`, an "
                "eighth to half) = ratio, µs. One call per layer. One thread of Zen 5, 7 rounds.",
                compared("heads_step.jsonl", "headkv"), ["heads_step.jsonl"],
                "python benchmarks/layer_step.py --compare heads --rounds 7 --out FILE",
            ),
            Section(
                "Packing a prompt",
                "Fit and encode 8,192 tokens of 3 KV heads of 64 channels, as a share of the prefill of one decoder "
                "layer of SmolLM2's shape; median and range. Other programs ran during the runs with one thread, so "
                "only shares are given.",
                encoding(), ["encode.jsonl"], "python benchmarks/prefill.py --parts layer --tokens 8192 --out FILE",
            ),
            Section(
                "Instructions",
                "Instructions per token and KV head at 9/3/64, counted by valgrind, so a busy machine does not matter. "
                "Instructions do not measure time, and valgrind does not know AVX-512. The counts are of an earlier "
                "build with the same inner loops.",
                instructions(), ["instructions.jsonl"], "python benchmarks/instructions.py --out FILE",
            ),
        ),
    )  # fmt: skip
