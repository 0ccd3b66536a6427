"""Equal bytes: language modelling with budgets, questions with selection, SubGen's streams, and fixed memory."""

from __future__ import annotations

import statistics

import budgets
from measured.base import Page, Section, estimate, middle, rows, span
from recorded import RECORDS, markdown
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.plots.groups import grouped, read_records

TASKS = {
    ("passkey", 0): "passkey 1k in 1/6", ("passkey", 2): "passkey 1k in 1/6, other samples",
    ("lines", 0): "40 pairs in 1/5",
}  # fmt: skip
"""Tasks of selection.jsonl by name and seed."""
TERMS = {
    "predicted": "error of z alone, by theory", "numerator": "error of z alone", "denominator": "error of τ, relative",
    "heaviest": "attention of the heaviest sampled token", "its norm": "norm of its value, over the median",
}  # fmt: skip
"""Terms of Algorithm 1 in subgen_layers.jsonl."""


def selection() -> str:
    """Return the table of questions at equal bytes. MB are without spare capacity of buffers."""
    lines = []
    for group in grouped(read_records([RECORDS / "selection.jsonl"])):
        for one in (group.full, *group.packed):
            own = group.records[one.recipe]
            held = statistics.fmean(row["bytes"] - row["bytes_by_part"].get("slack", 0) for row in own) / 1e6
            cells = [estimate(one.metrics[metric], 2) for metric in ("accuracy", "gold_nll")]
            lines.append((TASKS[group.name, group.seed], f"`{one.recipe}`", len(own), f"{held:.2f}", *cells))
    return markdown(("task", "recipe", "samples", "MB", "accuracy", "NLL of the answer"), lines)


def streams() -> str:
    """Return the table of SubGen on a stream of a million keys."""
    lines = []
    for row in rows("subgen.jsonl"):
        policy, _, codec = row["recipe"].rpartition("+")
        name = f"SubGen, `{codec}`" if policy else "every token, float16"
        cells = f"{row['bytes'] / 1e3:,.0f}", f"{row['step_microseconds']:,.0f}", f"{row['relative_error']:.2f}"
        lines.append((name, f"{row['context_tokens']:,}", *cells))
    return markdown(("recipe", "tokens", "kB", "µs per step", "error"), lines)


def layers() -> str:
    """Return the table of SubGen's errors by groups of layers."""
    parts = {"layers 0 to 2": slice(0, 3), "3 to 10": slice(3, 11), "11 to 29": slice(11, 30)}
    lines = []
    for row in rows("subgen_layers.jsonl"):
        if row["what"] == "attention error":
            means = [statistics.fmean(row["layers"][part]) for part in parts.values()]
            lines.append((f"error of attention, `{row['recipe']}`", *(f"{mean:.2f}" for mean in means)))
            continue
        for term, said in TERMS.items():
            means = [statistics.fmean(layer[term] for layer in row["layers"][part]) for part in parts.values()]
            lines.append((f"Algorithm 1, {said}", *(f"{mean:.2f}" for mean in means)))
    return markdown(("figure", *parts), lines)


def memory() -> str:
    """Return the table of caches with a fixed memory."""
    found: dict[str, list[dict[str, float]]] = {}
    for row in rows("memory_budget.jsonl"):
        found.setdefault(row["recipe"], []).append(row)
    lines = []
    for recipe, of in found.items():
        held = span([row["most_bytes"] / 1e6 for row in of])
        times = [row["milliseconds"] for row in of]
        lines.append((f"`{recipe}`", f"{of[-1]['tokens']:,}", held, f"{times[0]:.1f} / {times[-1]:.1f}", middle(times)))
    columns = ("recipe", "tokens", "MB, most in each part", "ms per token, first / last part", "median of parts")
    return markdown(columns, lines)


def samples() -> str:
    """Return a sentence about the two samples of passkeys together."""
    recipes = "subgen:budget=466,recent=32+turboquant:bits=4", "window:recent=18+turboquant:bits=2"
    found = [[], []]
    for row in rows("selection.jsonl"):
        if row["task"] == "passkey" and row["recipe"] in recipes:
            found[recipes.index(row["recipe"])].append(row["metrics"]["accuracy"])
    less = Estimate.of([a - b for a, b in zip(*found, strict=True)])
    shares = [estimate(Estimate.of(of), 2) for of in found]
    return (
        f"Over all {len(found[0])} passkeys, `{recipes[0]}` has {shares[0]} and `{recipes[1]}` {shares[1]}; the "
        f"difference is {estimate(less, 2)}."
    )


def bytes_page() -> Page:
    """Return the page of language modelling."""
    lines = rows("budgets.jsonl")
    command = "python benchmarks/budgets.py --text wikitext=FILE --text opticks=FILE --text code=FILE --out FILE"
    return Page(
        "Equal bytes",
        "Evicting, packing, or two rates before evicting, in 1/4 to 1/32 of the cache's bytes, on three texts.",
        "SmolLM2-135M, float32, real caches. 4,096 tokens are read at once and packed, which is 94.37 MB in bfloat16; "
        "the next 256 are read 64 at a time and compared with the full cache. Three windows each of WikiText-2, "
        "Newton's *Opticks* and files of Python's standard library. Codes, scales, tables, exact tokens, positions and "
        "scores count; spare room of buffers does not. Each recipe has one open number, as large as the room allows. "
        "`trellis` is fitted on the prompt; its tables are a quarter of the smallest budget.",
        (
            Section(
                "Divergence by budget",
                "Mean KL divergence, and in brackets perplexity divided by the full cache's. A star: the cache ends "
                "with more than its share of all tokens, which is an advantage. Two rates before eviction: half of the "
                "kept tokens have 4 bits and the others 2.\n\n![Divergence by budget](budgets.svg)",
                budgets.overview(lines), ["budgets.jsonl"], command,
            ),
            Section(
                "All recipes",
                "MB after the context and after the last token.", budgets.details(lines), ["budgets.jsonl"], command,
            ),
        ),
    )  # fmt: skip


def page() -> Page:
    """Return the page of selection policies."""
    return Page(
        "Token selection",
        "Evicting, packing and both where a question follows; SubGen on long streams and by layers; fixed memory.",
        "Token policies keep a part of the tokens. The papers' tables of SubGen are with the "
        "[papers](papers.md#subgen).",
        (
            Section(
                "Questions at equal bytes",
                "SmolLM2-135M, float32. As many tokens are kept as fit a share of the bytes in 16 bits. The context "
                f"is packed before the question is read, so no policy knows the question. {samples()} On pairs all "
                "are near the floor, because any pair may be asked for and half of the tokens are gone.",
                selection(), ["selection.jsonl"], "python benchmarks/papers.py subgen selection --out FOLDER",
            ),
            Section(
                "SubGen on a stream",
                "Algorithm 1 (`subgen:variant=stream,sinks=0,recent=128,delta=1.01,slots=16,budget=2200`) on one KV "
                "head of 64 channels, one thread of Zen 5; keys in 64 balls of diameter 1. Error is of the "
                "attention's output, relative, over 32 queries. Memory and time of the sketch do not grow with the "
                "context; with floats a step is faster than over all tokens from 262,144 tokens on.",
                streams(), ["subgen.jsonl"], "python benchmarks/streams.py growth --out FILE",
            ),
            Section(
                "SubGen by layers",
                "SmolLM2-135M, one window of 1,024 tokens, half of the bytes. The middle layers lose most.",
                layers(), ["subgen_layers.jsonl"], "python benchmarks/subgen_layers.py --text FILE --out FILE",
            ),
            Section(
                "Fixed memory",
                "`memory=2MB` on a model of 2 layers with random weights, up to 200,000 tokens, one thread. Other "
                "programs ran beside it. A part is a twentieth of the stream.",
                memory(), ["memory_budget.jsonl"], "python benchmarks/streams.py memory --out FILE",
            ),
        ),
    )  # fmt: skip
