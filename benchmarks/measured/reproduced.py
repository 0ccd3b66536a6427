"""Tables and figures of four papers: agreement, orderings, and each experiment."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import papers
from experiments import kvquant_tables
from measured.base import MODELS, Page, Section, model, rows
from measured.claims import CLAIMS, PERPLEXITIES
from measured.verdicts import Claim, differences, line
from recorded import markdown

ELSEWHERE = {("kvquant", name): "kvquant" for name in kvquant_tables.EXPERIMENTS} | {
    ("subgen", "selection"): "selection"
}
"""Pages of experiments that are not on the page of all papers."""
SHOWN = (
    ("QJL, Lemma 3.2", "agrees", "test: the estimate is unbiased"),
    ("QJL, Lemma 3.5 and Theorem 3.6", "differs", "test: both need larger constants, see "
     "[the bounds](../methods/rotations.md#the-papers-bounds)"),
    ("QJL at “3 bits”", "differs", "arithmetic: the setting of the authors' code holds 3.87 bits, KIVI's 3.00"),
    ("KVQuant, Tables 7 and 8", "36 of 42 cells", "arithmetic, by `tersekv estimate --tables kvquant`, compared by "
     "hand; a test compares LLaMA-7B at 128K, 7 of 7. Table 7's weights differ in the last digit: here they are "
     "attention, gated MLP and two embeddings, and the paper does not say what it counts"),
    ("KVQuant, Table 16", "agrees", "run on three models, see `table16` below: gradients take minutes, a layer's "
     "codebooks and thresholds less than a second"),
    ("KVQuant, one million tokens", "agrees", "run, see `million` below: one layer holds them in the bytes of "
     "`tersekv estimate`, and finds one among them"),
    ("SubGen, Theorem 1", "agrees", "test: its bounds hold for streams that form clusters"),
    ("SubGen, sublinear memory", "depends", "only with a number of tokens, `memory=` or δ: a budget that is a fraction "
     "grows with the text"),
    ("PolarQuant, Lemma 2", "agrees", "test: angles of rotated vectors have its densities"),
    ("PolarQuant, §4", "differs", "arithmetic: the full recursion holds 5.16 times less by its formula, where it "
     "prints 4.008"),
)  # fmt: skip
"""Results that need no samples."""
COLUMNS = ("where", "claim", "models", "n", "difference", "p", "verdict")
HOW = (
    "A line compares the first row that its claim names with the second, on each model that was run: **holds** or "
    "**fails** if p < .05, **open** otherwise. *agrees* and *differs* need two of the three models (SmolLM2-135M, "
    "Qwen2.5-Coder-0.5B, Gemma 3 270M); with fewer, or without a spread, the verdict is *cannot say*. Times of one "
    "layer of random numbers need no second model. The difference is that of KL divergences, accuracies or recalls, "
    "and a percentage of perplexities and times, ± its standard error. Samples are paired, and p is Student's; of "
    "accuracies and recalls it counts the signs of the samples that differ. `u`: the record has no samples, so the "
    "rows count as independent, which mostly makes the error too large. With a margin p is one-sided, and the spread "
    "of answers at least that of a loss of the margin. p is not corrected for the number of lines: of twenty true "
    "equalities one holds or fails by chance."
)
CENTRED = ("polarquant", "qjl", "turboquant:bits=4", "int4", "normalfloat")
"""Recipes of `three_models.jsonl` with and without `centre=true`."""
ALSO = {
    "qjl": "Lemmas 3.2 and 3.5 and Theorem 3.6 are tested by `tests/codecs/test_claims_qjl.py`; Figure 2 is drawn by "
    "`tersekv plot magnitudes`. Table 2 (lm-eval) was not run.",
    "kvquant": "Perplexity tables are on [their own page](kvquant.md). Figures 2 and 4 are drawn by `tersekv plot "
    "outliers`; Tables 7 and 8 printed by `tersekv estimate --tables kvquant`. Tables 6 and 22 are kernels on a GPU.",
    "subgen": "Theorem 1 is tested by `tests/policies/test_claims_subgen.py`; a stream of a million keys is "
    "on the page of [token selection](selection.md).",
    "polarquant": "Lemma 2 is tested by `tests/codecs/test_claims_polarquant.py`; Figure 2 is drawn by `tersekv plot "
    "angles`.",
}
"""Other results of each paper that are here."""


MORE = {
    "kvquant": "Perplexities are on [their own page](kvquant.md#agreement).",
    "subgen": "With SmolLM2 the full cache answers 1 of 7 questions of Table 1, so nothing can be lost there. "
    "Algorithm 1 is compared at fewer bytes than the others, not at equal ones: its size is predicted for samples "
    "that are all of different tokens, and some are of the same. The true bits say by how much.",
    "polarquant": "The paper's figures on this page are second-hand: they were taken from quotations of the paper.",
}
"""Remarks below the table of a paper's claims."""


def experiments(paper: str, page: str, said: Sequence[str] = ()) -> Iterator[Section]:
    """Yield the sections of a paper's experiments on a page. said: sentences that the page has once for all."""
    lines = papers.read_lines(paper)
    for name in papers.PAPERS[paper][1]:
        if ELSEWHERE.get((paper, name), "papers") == page:
            section = papers.section(paper, name, [line for line in lines if line["table"] == name])
            note = functools.reduce(lambda text, known: text.replace(known, ""), said, section.note)
            note += remarks(paper, name)
            yield replace(section, note=note.replace("  ", " "))


def contents() -> str:
    """Return the table of all experiments."""
    lines = []
    for paper, (name, found) in papers.PAPERS.items():
        records = papers.read_lines(paper)
        for key, experiment in found.items():
            page = ELSEWHERE.get((paper, key))
            title = f"[{experiment.title}]({page}.md)" if page else experiment.title
            lines.append((name.split()[0], f"`{key}`", title, papers.ran([r for r in records if r["table"] == key])))
    return markdown(("paper", "experiment", "subject", "run here"), lines)


def remarks(paper: str, experiment: str) -> str:
    """Return sentences about an experiment with figures of its records."""
    cells = {(r["row"], r["column"], r["metric"].partition(",")[0]): r for r in papers.read_lines(paper)
             if r["table"] == experiment and "8B" in r["metric"]}  # fmt: skip
    if (paper, experiment) != ("qjl", "figure3") or not cells:
        return ""
    step, read = "ms to decode a token", "ms to read the prompt"

    def ratio(row: str, column: str, metric: str) -> float:
        return float(cells["QJL", column, metric]["mean"] / cells[row, column, metric]["mean"])

    slower = 100 * ratio("exact", "1k", read) - 100
    return (
        f"\n\n**Read with care.** QJL slows a prompt of 1,024 tokens by {slower:.0f} %. "
        f"At 16k a step of `exact`, transformers' cache, copies and widens all keys and takes "
        f"{1 / ratio('exact', '16k', step):.0f} times as long as QJL's; 16-bit tokens read by our kernels take "
        f"{1 / ratio('exact, our kernels', '16k', step):.1f} times as long (8B's shape)."
    )


def parts() -> Iterator[Section]:
    """Yield a heading for each paper, and its experiments below it."""
    for paper, (name, _) in papers.PAPERS.items():
        title, _, source = name.partition(" ")
        yield Section(title, f"{source.strip('()')}. {ALSO[paper]}", "", [f"papers/{paper}.jsonl"])
        yield from (section.below() for section in experiments(paper, "papers"))


def verdicts_of(claims: Sequence[Claim]) -> str:
    """Return the table of verdicts on claims."""
    return markdown(COLUMNS, map(line, claims))


def centred() -> str:
    """Return the table of divergences with and without the keys' mean, of the models that have both."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row in rows("three_models.jsonl"):
        if row["text"] == "wikitext":
            for recipe in CENTRED:
                if f"{recipe},centre=true" in row or f"{recipe}:centre=true" in row:
                    with_mean = row[recipe]["kl"]
                    without = (row.get(f"{recipe},centre=true") or row[f"{recipe}:centre=true"])["kl"]
                    found.setdefault(recipe, {})[model(row)] = (with_mean, without)
    names = list(dict.fromkeys(name for of in found.values() for name in of))
    lines = (
        [f"`{recipe}`", *(f"{of[name][0]:.4f} → {of[name][1]:.4f}" if name in of else "–" for name in names)]
        for recipe, of in found.items()
    )
    return markdown(("KL divergence, mean kept → removed", *names), lines)


def page() -> Page:
    """Return the page of all papers."""
    return Page(
        "The papers' tables",
        "Agreement with QJL, KVQuant, SubGen and PolarQuant, and every experiment that was run, beside the paper's "
        "figures.",
        "Each table is one command, which runs the paper's protocol with any model; a stopped run continues. Levels "
        "differ from the papers, because they measured models of 7 billion parameters and more and most tables here "
        "ran on SmolLM2-135M, whose heads have 64 channels. `after-prompt`: the whole prompt is read exactly, then "
        "packed, as in the papers. `during-prefill`: the prompt's own attention reads coded tokens. "
        "`before-question`: the context is packed before the question is read, the default of `tersekv eval`.",
        (
            Section("Agreement", HOW, ""),
            *(
                Section(papers.PAPERS[paper][0].split()[0], MORE.get(paper, ""), verdicts_of(claims), level=3)
                for paper, claims in CLAIMS.items()
            ),
            Section("Proved, tested, computed or run", "", markdown(("result", "verdict", "how"), SHOWN), level=3),
            Section(
                "What the models agree on",
                "The papers do not say that codecs which rotate or scale whole vectors need keys without their mean. "
                "Removing it (`centre=true`) lowers the divergence of all of them on all three models. It is one "
                "window of wikitext-2 per model, so an error is not known; the direction is the same in every cell.",
                centred(),
                ["three_models.jsonl"],
            ),
            Section(
                "Experiments",
                "Left out: models of 7 billion parameters, LongBench's full sets, lengths above 8,192 tokens (the "
                "model's limit), and kernels on a GPU. `--model` and `--values` run them elsewhere. Not finished, with "
                "about the time on one thread of Zen 5: SmolLM2 with 4 and 2 bits in KVQuant's tables, 12 minutes per "
                "table; Qwen in windows of 2,048 tokens, 3 minutes for a window of 7 rows, and 84 seconds for a needle "
                "of 2k; PolarQuant's Table 2 at the paper's length, 17 minutes per round on two threads.",
                contents(),
            ),
            *parts(),
        ),
    )  # fmt: skip


def kvquant_page() -> Page:
    """Return the page of KVQuant's perplexity tables."""
    said = kvquant_tables.PASS, kvquant_tables.NO_SINK
    return Page(
        "KVQuant's ablations",
        "KVQuant's perplexity tables: channels and tokens, RoPE, codebooks, outliers, exact tokens, corpora, lengths.",
        f"{headline()} {kvquant_tables.PASS} In Tables 11, 12 and 14 the paper seems to have no exact token: its nuq "
        "without outliers is 5.94 there and 5.87 in Table 18. Calibrated on 16 samples of 2,048 tokens of wikitext-2's "
        "training text where a table names nothing else. Calibrating the same samples again changes perplexity by up "
        "to 1.3 % at 4 and 3 bits and 3.7 % at 2 bits, so smaller differences are not settled by windows alone. Of "
        "SmolLM2-135M, columns with 4 and 2 bits, and Tables 13, 21 and those after them, are from before two "
        "changes: k-means started at random, and outliers of values were rounded "
        "up to 2 of 192 values (1.04 % instead of 1 %). The other models were read in 16 to 32 windows of 512 tokens, "
        "and calibrated on 4 samples of 512, where a table says so, which is a smaller test than the paper's.",
        (Section("Agreement", f"{HOW} Claims are at 3 bits unless they say otherwise.", verdicts_of(PERPLEXITIES),
                 ["papers/kvquant.jsonl"]), *experiments("kvquant", "kvquant", said)),
    )  # fmt: skip


def headline() -> str:
    """Return the paper's first claim beside what was measured."""
    found = [
        f"{100 * math.expm1(one.mean):.1f} % on {MODELS.get(one.model, one.model)} (n = {one.n})"
        for one in differences(PERPLEXITIES[0])
    ]
    return (
        "**The paper's first claim is not met here.** It says that 3 bits with 1 % of outliers cost less than .1 "
        f"perplexity (1.2 % on LLaMA-7B, 5.75 instead of 5.68). Here they cost {', '.join(found[:-1])} and {found[-1]}."
    )
