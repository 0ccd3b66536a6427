"""Tables and figures of four papers: agreement, orderings, and each experiment."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import papers
from experiments import kvquant_tables
from measured.base import Page, Section, table

ELSEWHERE = {("kvquant", name): "kvquant" for name in kvquant_tables.EXPERIMENTS} | {
    ("subgen", "selection"): "selection"
}
"""Pages of experiments that are not on the page of all papers."""
AGREEMENT = (
    ("QJL, Lemma 3.5 and Theorem 3.6", "no", "both need larger constants, as the tests derive"),
    ("QJL, ablations", "partly", "orthogonal rows and outlier channels help; more bits in the first layers do not"),
    ("QJL at 3 bits against KIVI", "no", "its setting holds 3.87 bits, KIVI's 3.00; at 4.00 bits it is level here"),
    ("QJL, Figure 3", "yes", "but KVQuant also decodes faster than the full cache, because packed bytes are read"),
    ("KVQuant, Table 2", "yes", "2 bits with outliers find more passkeys than KIVI with 2 bits"),
    ("KVQuant, Tables 9 to 21", "mostly", "[line by line](kvquant.md#orderings); values have 192 channels here"),
    ("KVQuant, Tables 7 and 8", "yes", "sizes, by `tersekv estimate --tables kvquant`"),
    ("SubGen, Figure 1", "partly", "keys have the smaller radius, values the smaller mean distance"),
    ("SubGen, Table 1", "no", "k-centre keeps a part of each line, and an answer needs a whole one"),
    ("SubGen, Algorithm 1", "partly", "its bounds hold, but on the model it is far behind k-centre"),
    ("PolarQuant, Figure 3", "mostly", "SnapKV is over PyramidKV here, and KIVI with 2 bits below both"),
    ("PolarQuant, Table 2", "no", "every packed cache generates faster than the full one here"),
    ("PolarQuant, full recursion", "no", "5.16 times by the paper's formula, where it prints 4.008"),
)
ORDERINGS = (
    ("9", "different", "keys and values both per channel are better than both per token at every bit width"),
    ("9", "as in the paper", "keys per channel and values per token are best at 3 and 2 bits"),
    ("10", "as in the paper", "keys before RoPE are better at every bit width"),
    ("11", "different", "at 2 bits Fisher alone is better than Fisher × s², and nf is worse than int"),
    ("11", "different", "k-means without weights is worse than int at 4 bits, and no better at 3"),
    ("11", "no difference", "Fisher and Fisher × s², nf and int at 4 and 3 bits; nuq and int at 4 bits"),
    (
        "11",
        "as in the paper",
        "weights help k-means at every bit width; nuq is better than nf, and than int at 3 and 2",
    ),
    ("12", "as in the paper", "per vector is better at 3 and 2 bits; no difference at 4 bits"),
    ("13", "as in the paper", "an exact first token helps, most at 2 bits; no difference at 4 bits with 1 %"),
    ("14", "as in the paper", "no difference with 1 % outliers; without, online ranges help at 2 bits only"),
    ("17, 18, 19", "as in the paper", "nuq is better than int and nf per token and in groups; 1 % outliers help"),
    ("20", "as in the paper", "keys per token are better after RoPE at 3 and 2 bits; no difference at 4 bits"),
    ("21", "as in the paper", "no difference between the corpora, but for 1.5 % at 2 bits on C4"),
    ("data types (ours)", "no difference", "nuq and int with outliers at 4 bits"),
    ("Q-Norm", "no difference", "at any bit width"),
)
"""Two rows differ if their log perplexities differ by more than two standard errors on the same windows."""
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


def experiments(paper: str, page: str, said: Sequence[str] = ()) -> Iterator[Section]:
    """Yield the sections of a paper's experiments on a page. said: sentences that the page has once for all."""
    lines = papers.read_lines(paper)
    for name in papers.PAPERS[paper][1]:
        if ELSEWHERE.get((paper, name), "papers") == page:
            section = papers.section(paper, name, [line for line in lines if line["table"] == name])
            note = functools.reduce(lambda text, known: text.replace(known, ""), said, section.note)
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
    return table(("paper", "experiment", "subject", "run here"), lines)


def parts() -> Iterator[Section]:
    """Yield a heading for each paper, and its experiments below it."""
    for paper, (name, _) in papers.PAPERS.items():
        title, _, source = name.partition(" ")
        yield Section(title, f"{source.strip('()')}. {ALSO[paper]}", "", [f"papers/{paper}.jsonl"])
        yield from (section.below() for section in experiments(paper, "papers"))


def page() -> Page:
    """Return the page of all papers."""
    return Page(
        "The papers' tables",
        "Agreement with QJL, KVQuant, SubGen and PolarQuant, and every experiment that was run, beside the paper's "
        "figures.",
        "Each table is one command, which runs the paper's protocol with any model; a stopped run continues. Levels "
        "differ from the papers, because they measured models of 7 billion parameters and more and everything here "
        "ran on SmolLM2-135M, whose heads have 64 channels. `after-prompt`: the whole prompt is read exactly, then "
        "packed, as in the papers. `during-prefill`: the prompt's own attention reads coded tokens. "
        "`before-question`: the context is packed before the question is read, the default of `tersekv eval`.",
        (
            Section("Agreement", "", table(("result", "agrees", "why, or how"), AGREEMENT)),
            Section(
                "Experiments",
                "Left out: models of 7 billion parameters, LongBench's full sets, lengths above 8,192 tokens (the "
                "model's limit), and kernels on a GPU. `--model` and `--values` run them elsewhere.",
                contents(),
            ),
            *parts(),
        ),
    )  # fmt: skip


def kvquant_page() -> Page:
    """Return the page of KVQuant's perplexity tables."""
    return Page(
        "KVQuant's ablations",
        "KVQuant's perplexity tables: channels and tokens, RoPE, codebooks, outliers, exact tokens, corpora, lengths.",
        f"{kvquant_tables.PASS} In Tables 11, 12 and 14 the paper seems to have no exact token: its nuq without "
        "outliers is 5.94 there and 5.87 in Table 18. SmolLM2-135M, float32, calibrated on 16 samples of 2,048 "
        "tokens of wikitext-2's training text. Calibrating the same samples again changes perplexity by up to 1.3 % "
        "at 4 and 3 bits and 3.7 % at 2 bits, so smaller differences are not settled.",
        (Section("Orderings", "Rows of a table are compared on the same windows; they differ if their log perplexities "
                 "differ by more than two standard errors.", table(("table", "here", "ordering"), ORDERINGS),
                 ["papers/kvquant.jsonl"]),
         *experiments("kvquant", "kvquant", (kvquant_tables.PASS, kvquant_tables.NO_SINK))),
    )  # fmt: skip
