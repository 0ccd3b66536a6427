"""Tables and figures of four papers: agreement, orderings, and each experiment."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import papers
from experiments import kvquant_tables
from measured.base import MODELS, Page, Section, model, rows
from measured.claims import CLAIMS, PERPLEXITIES
from measured.verdicts import Claim, differences, line
from recorded import markdown
from tersekv.layouts.base import whole_share

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
     "hand; a test compares LLaMA-7B at 128K, 7 of 7. Table 7's weights differ in the last digit: attention, "
     "gated MLP and two embeddings are counted here, and the paper does not say what it counts"),
    ("KVQuant, Table 16", "run", "on three models, see `table16` below: gradients take minutes, a layer's codebooks "
     "and thresholds less than a second; the paper's layers have 32 times the channels and more"),
    ("KVQuant, one million tokens", "run", "see `million` below: one layer holds them in the bytes of `tersekv "
     "estimate`, and finds one among them. With 1 % of outliers 32 such layers exceed the paper's GPU of 80 GB; "
     "without them the estimate is 64.1 GiB"),
    ("KVQuant, ten million tokens on 8 GPUs", "differs", "arithmetic, by `tersekv estimate`: for LLaMA-7B they are "
     "611.6 GiB without outliers and 712.9 with, on which the quality rests. With outliers 8 shares by heads take 91.8 "
     "GiB each, so 12 GPUs of 80 GiB are needed (72 GiB each with the weights)"),
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
    "**fails** if p < .05, **open** otherwise. The verdict is *agrees* or *differs* if two of the three models "
    "(SmolLM2-135M, Qwen2.5-Coder-0.5B, Gemma 3 270M) say the same, *cannot say* otherwise. Layers of random "
    "numbers take the place of models where times of one layer are compared: at least two, and more than half of "
    "them, must say the same. *(ours)*: not a claim of the paper.\n\n"
    "The difference is that of KL divergences, accuracies, recalls or negative log-likelihoods, and a percentage of "
    "perplexities and times, ± its standard error. Samples are paired, except at `u`, where the record has none: there "
    "the rows count as independent, which mostly makes the error too large. p is by Student's distribution, that of "
    "paired accuracies and recalls by flipping the signs of the differences. Without a margin it is two-sided. With "
    "one it is the probability of such samples if the margin were just exceeded, or, where the line says *fails*, just "
    "kept. To show that at most 2 answers in 100 are lost, 149 samples without a loss are needed.\n\n"
    "Errors are of windows and questions alone: each recipe was calibrated once. On some lines samples were added "
    "when p had been seen, which is not corrected for that, nor for the number of lines."
)
"""Explanation of the tables of agreement."""
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
    "qjl": "Times of Figure 3 are of two threads of Zen 4, beside which tests ran for some minutes. On Zen 5, with "
    "earlier code, QJL slowed the prompt of 1k of 8B's shape by 8.9 ± 0.2 %, which holds, and was not told from 16-bit "
    "tokens at 16k of SmolLM2's shape.",
    "kvquant": "Perplexities are on [their own page](kvquant.md#agreement).",
    "subgen": "Lines of Table 1 are at the paper's 65 % of the bytes, those of the shorter wording at 50 %. Prompts "
    "have about 300 tokens, the paper's 5,000 and more. In §3.2 Algorithm 1 holds more bytes than k-center, as the "
    "true bits say.",
    "polarquant": "The paper's figures on this page are second-hand: they were taken from quotations of the paper. "
    "SnapKV and PyramidKV hold twice PolarQuant's bytes on Gemma 3, because its layers with a sliding window are not "
    "reduced, so lines that compare PolarQuant with them leave Gemma 3 out.",
}
"""Remarks below the table of a paper's claims."""


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
    return markdown(("paper", "experiment", "subject", "run here"), lines)


def parts() -> Iterator[Section]:
    """Yield a heading for each paper, and its experiments below it."""
    for paper, (name, _) in papers.PAPERS.items():
        title, _, source = name.partition(" ")
        yield Section(title, f"{source.strip('()')}. {ALSO[paper]}", "", [f"papers/{paper}.jsonl"])
        yield from (section.below() for section in experiments(paper, "papers"))


def verdicts_of(claims: Sequence[Claim]) -> str:
    """Return the table of verdicts on claims."""
    return markdown(COLUMNS, map(line, claims))


def counted() -> str:
    """Return how many claims have each verdict, over both pages."""
    claims = [*(claim for of in CLAIMS.values() for claim in of), *PERPLEXITIES]
    found = Counter(line(claim)[-1].strip("*") for claim in claims)
    return (
        f"Of {len(claims)} lines here and on [KVQuant's page](kvquant.md#agreement), {found['agrees']} agree, "
        f"{found['differs']} differ and {found['cannot say']} cannot say."
    )


def centred() -> str:
    """Return the table of divergences with and without the keys' mean, of the recipes and models that have both."""
    found: dict[str, dict[str, str]] = {}
    for row in rows("three_models.jsonl"):
        for recipe in row if row["text"] == "wikitext" else ():
            without = row.get(f"{recipe}{',' if ':' in recipe else ':'}centre=true")
            if without:
                kept = row[recipe]
                shown = f"{kept['kl']:.4f} → {without['kl']:.4f} ({kept['bits']:.2f} → {without['bits']:.2f})"
                found.setdefault(recipe, {})[model(row)] = shown
    names = list(dict.fromkeys(name for of in found.values() for name in of))
    lines = ([f"`{recipe}`", *(of.get(name, "–") for name in names)] for recipe, of in found.items())
    return markdown(("KL divergence (true bits), mean kept → removed", *names), lines)


def page() -> Page:
    """Return the page of all papers."""
    return Page(
        "The papers' tables",
        "Agreement with QJL, KVQuant, SubGen and PolarQuant, and every experiment that was run, beside the paper's "
        "figures.",
        "The commands below a table made its rows, except those from before commands were kept, most of them of "
        "SmolLM2. They run the paper's protocol with any model; a stopped run continues. Levels differ from the "
        "papers, because they measured models of 7 billion parameters and more and these have .1 to .5 billion. "
        "`after-prompt`: the whole prompt is read exactly, then packed, as in the papers. `during-prefill`: the "
        "prompt's own attention reads coded tokens. `before-question`: the context is packed before the question is "
        "read, the default of `tersekv eval`. Where Gemma 3's full cache has more bits than its dtype, it also held "
        "tokens that had left the sliding windows: their bytes count, but not their elements.",
        (
            Section("Agreement", f"{counted()} {HOW}", ""),
            *(
                Section(papers.PAPERS[paper][0].split()[0], MORE.get(paper, ""), verdicts_of(claims), level=3)
                for paper, claims in CLAIMS.items()
            ),
            Section("Proved, tested, computed or run", "", markdown(("result", "verdict", "how"), SHOWN), level=3),
            Section(
                "What the models agree on",
                "The papers do not say that codecs which rotate or scale whole vectors need keys without their mean. "
                "Removing it (`centre=true`) lowers the divergence of five of them on all three models, most on "
                "Qwen2.5. KVarN, which scales channels as well, is the exception: it "
                "gets worse on two models. KIVI, which has a zero per channel, hardly changes. One window of "
                "wikitext-2 per model, so errors are not known. The mean costs bits where a text is short.",
                centred(),
                ["three_models.jsonl"],
            ),
            Section(
                "Experiments",
                "Left out: models of 7 billion parameters, LongBench's and lm-eval's full sets, models at lengths "
                "above 16,384 tokens, and kernels on a GPU. `--model` and `--values` run them elsewhere. Not finished, "
                "with about the time on one thread of Zen 5: Qwen in windows of 2,048 tokens, 3 minutes for a window "
                "of 7 rows, 84 seconds for a needle of 2k; RULER at 2k on Gemma 3, 160 minutes for ten samples of "
                "each task; three calibrations of each row instead of one, three times a table's time; KVQuant's "
                "Table 5, whose quantised weights are not implemented here.",
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
        "training text, or on 4 of 512 where a table says so, which is a smaller test than the paper's. "
        f"{calibrations()}Outliers of "
        f"values are whole numbers per token, rounded down: {shares()}.",
        (Section("Agreement",
                 "Claims are at 3 bits unless they say otherwise. [How to read a line](papers.md#agreement).",
                 verdicts_of(PERPLEXITIES), ["papers/kvquant.jsonl"]), *experiments("kvquant", "kvquant", said)),
    )  # fmt: skip


def shares() -> str:
    """Return how many values of a token are outliers on each model."""
    models = (("SmolLM2-135M", 192), ("Qwen2.5-Coder-0.5B", 128), ("Gemma 3 270M", 256))
    ones = ", ".join(f"{(one := whole_share(0.01, n))} of {n} on {name} ({100 * one / n:.2f} %)" for name, n in models)
    halves = ", ".join(f"{whole_share(0.005, n) or 'none'} on {name}" for name, n in models)
    return f"1 % are {ones}; .5 % are {halves}; .1 % are none"


def calibrations() -> str:
    """Return by how much other samples of calibration change perplexity."""
    said = []
    lines = [r for r in papers.read_lines("kvquant") if r["table"] == "samples" and r["metric"] == "perplexity"]
    of_seeds = [r for r in lines if r["row"] in kvquant_tables.SEEDS]
    for name, column in dict.fromkeys((r["model"], r["column"]) for r in of_seeds):
        means = [r["mean"] for r in of_seeds if (r["model"], r["column"]) == (name, column)]
        if len(means) == len(kvquant_tables.SEEDS):
            said.append(f"{100 * (max(means) / min(means) - 1):.1f} % on {MODELS[name]} at {column}")
    text = f"Samples at other places of the text change perplexity by up to {', '.join(said)} (three seeds). "
    return text if said else ""


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
