"""Presets on three models, and facts that are found in texts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import three_models
from measured.base import MODELS, Page, Row, Section, cache, earlier, model, rows
from recorded import markdown
from tersekv.lab.evals.reader import FULL

FACTS = {"passkey": "passkeys", "needle": "needles"}
FACTS_COMMAND = """\
tersekv eval passkey --model {0} --lengths 2k,4k,8k --samples 20 --recipe default --out FOLDER
tersekv eval needle --model {0} --lengths 2k,4k,8k --samples 4 --recipe default --out FOLDER"""
Samples = dict[str, Row]
"""Rows by their sample."""


def found_facts(found: Iterable[Row]) -> str:
    """Return the table of facts: what a cache finds and what the full cache finds in the same samples.

    A sample that was run twice counts once.
    """
    groups: dict[tuple[str, str, int], dict[str, Samples]] = {}
    for row in found:
        if row["task"] in FACTS:
            at = model(row), FACTS[row["task"]], row["details"]["length"]
            groups.setdefault(at, {}).setdefault(row["recipe"] + earlier(row), {})[row["sample"]] = row
    names, lines = list(MODELS.values()), []
    for at in sorted(groups, key=lambda at: (names.index(at[0]), *at[1:])):
        for recipe, samples in groups[at].items():
            if recipe != FULL:
                pairs = [(row, groups[at][FULL][name]) for name, row in samples.items()]
                right, nll = (
                    [[row["metrics"][metric] for row in side] for side in zip(*pairs, strict=True)]
                    for metric in ("accuracy", "gold_nll")
                )
                bits = statistics.fmean(row["bits_per_element"] for row in samples.values())
                found_of = f"{sum(right[0]):.0f} / {sum(right[1]):.0f} of {len(pairs)}"
                likelihood = " / ".join(f"{statistics.fmean(side):.2f}" for side in nll)
                written, _, label = recipe.partition(" ")
                named = f"{cache(written)} {label}".strip()
                lines.append((*at[:2], f"{at[2]:,}", named, found_of, likelihood, f"{bits:.1f}"))
    return markdown(("model", "facts", "tokens", "recipe", "found", "NLL", "true bits"), lines)


def longbench() -> str:
    """Return the table of LongBench's samples."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows("mixed.jsonl"):
        if row["task"] == "longbench":
            groups.setdefault((row["details"]["subtask"], row["recipe"] + earlier(row)), []).append(row)
    lines = []
    for (subtask, recipe), samples in groups.items():
        nll = [row["metrics"]["gold_nll"] for row in samples if "gold_nll" in row["metrics"]]
        score = statistics.fmean(row["metrics"]["accuracy"] for row in samples)
        cells = f"{score:.2f}", len(samples), f"{statistics.fmean(nll):.2f}" if nll else "–"
        written, _, label = recipe.partition(" ")
        lines.append((subtask, f"{cache(written)} {label}".strip(), *cells))
    return markdown(("subtask", "recipe", "score", "samples", "NLL"), lines)


def page() -> Page:
    """Return the page."""
    return Page(
        "Presets and retrieval",
        "`default` and `safe` beside `kivi:bits=4` on three models, five texts and three lengths; passkeys and "
        "needles.",
        "Presets are rules: `trellis` chooses the codec of each layer by its shape. On Gemma 3, with heads of 256 "
        "channels, both are `kivi:bits=4`, but in layers that hold 4,096 tokens and more `trellis` with 4 bits.",
        (
            Section(
                "Presets on three models",
                "True bits with everything counted, and KL divergence in nats, float32: a prefix is packed after one "
                "exact prefill, and the next 256 tokens are scored 64 at a time. One window is a small sample: cells "
                "that differ by a third can change places with another window. Texts: wikitext-2 test, C4, Python's "
                "standard library (code), MT-Bench's questions (chat), manual pages in three languages. Gemma 3 read "
                "other files of the last two.",
                three_models.of_presets(rows("three_models.jsonl")), ["three_models.jsonl"],
                "python benchmarks/three_models.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --text C4=FILE --out "
                "FOLDER",
            ),
            Section(
                "Retrieval on three models",
                "A fact is hidden in a text, which is packed before the question is read. Each cell compares a cache "
                "with the full one on the same samples: facts found, and the negative log-likelihood of the right "
                "answer (NLL), nats per token. Rates of `mixed:allot=model` were measured on the text of its first "
                "use, and those of `allot=prompt` are read from the prompt; `small` is "
                "`mixed:allot=prompt,bias_correction=full+trellis:bits=1.7,calibration=prompt`. Rows say where a layer "
                "has one pair of rates, and where keys were fitted to the diagonal of the metric of their queries. On "
                "Gemma 1.7 bits miss facts also with equal rates: they are too few for one KV head of 256 channels. "
                "Since the rows with the diagonal `allot=prompt` gives such heads 3.5 bits on average or more, and "
                "layers with a sliding window 4.",
                found_facts(rows("retrieval.jsonl")), ["retrieval.jsonl"], FACTS_COMMAND.format("MODEL"),
            ),
            Section(
                "Retrieval in longer texts",
                "The same with SmolLM2-135M, whose own limit is 8,192 tokens. Rates of `mixed:allot=model` were "
                "measured on WikiText-2's training text; rows say where a layer has one pair of rates, and where any "
                "share of a head's tokens could have its higher rate.",
                found_facts(rows("mixed.jsonl")), ["mixed.jsonl"], FACTS_COMMAND.format("smollm2"),
            ),
            Section(
                "LongBench",
                "SmolLM2-135M, prompts cut to 4,096 tokens. With so few samples only the likelihoods say something.",
                longbench(), ["mixed.jsonl"],
                "tersekv eval longbench --length 4k --samples 4 --subtasks trec --recipe default --out FOLDER",
            ),
        ),
    )  # fmt: skip
