"""KVQuant's perplexity tables and ablations (arXiv 2401.18079, §4.1 and Appendices G to Q)."""

from __future__ import annotations

from experiments.base import Corpus, Experiment
from experiments.windows import C4, WIKITEXT, Cell, Windows, by_bits, recipe

PASS = (
    "One forward pass per window of 2,048 tokens, or of 512 where a table says `context 512`; every key and value is "
    "quantised except the first token's. The paper scores all windows of wikitext-2 test, here the first ones, as many "
    "as a table says."
)
NO_SINK = (
    "The paper's nuq without outliers is 5.94 here and 5.87 in its Table 18, where the first token is exact. So this "
    "ablation seems to have no exact token; ours has one."
)
INT = {"table": "int", "outliers": 0.0}
PER_TOKEN = {"axis": "token", "pre_rope": False, "outliers": 0.0}
"""The paper's baselines: keys after RoPE and values per token, one range for all heads."""
HEADS = "groups of 64 (one head)"
HALVES = "groups of 32 (half a head)"
FROM_C4 = Corpus(C4)
Rows = list[tuple[str, str, dict[str, object]]]


BASELINES: Rows = [
    ("int per token", "kvquant", {**PER_TOKEN, "table": "int"}),
    ("nf per token", "kvquant", {**PER_TOKEN, "table": "nf"}),
    (f"int, {HEADS}", "uniform", {"group": 64}),
    (f"int, {HALVES}", "uniform", {"group": 32}),
]
GROUPS: Rows = [
    (f"nf, {HEADS}", "normalfloat", {"group": 64, "zero_point": True}),
    (f"nf, {HALVES}", "normalfloat", {"group": 32, "zero_point": True}),
]
NUQ: Rows = [("nuq", "kvquant", {"outliers": 0.0}), ("nuq, 1 %", "kvquant", {})]


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _sinks() -> tuple[Cell, ...]:
    """Return Table 13. Without an exact token the calibration includes the first token, too."""
    return tuple(
        Cell(
            f"{_percent(share)}, {'first token exact' if sinks else 'no token exact'}",
            f"{bits} bits",
            recipe("kvquant", bits=bits, outliers=share),
            Corpus(sinks=sinks),
            sinks=sinks,
        )
        for bits in (4, 3, 2)
        for share in (0.0, 0.01)
        for sinks in (0, 1)
    )


def _corpora() -> tuple[Cell, ...]:
    return tuple(
        Cell(f"calibrated on {learnt}", f"{name}, {bits} bits", recipe("kvquant", bits=bits), corpus, text)
        for name, text in (("wikitext-2", WIKITEXT), ("C4", C4))
        for bits in (4, 3, 2)
        for learnt, corpus in (("wikitext-2", Corpus()), ("C4", FROM_C4))
    )


def _lengths() -> tuple[Cell, ...]:
    return tuple(
        Cell(f"nuq{bits}, 1 %", f"{context:,}", recipe("kvquant", bits=bits), context=context)
        for context in (512, 1024, 2048, 4096, 8192)
        for bits in (4, 3, 2)
    )


SEEDS = {f"seed {seed}": Corpus(seed=seed) for seed in (0, 1, 2)}
"""Calibrations on as many samples at other places of the text."""
SAMPLES = {"1 sample": Corpus(samples=1), "4 samples": Corpus(samples=4), **SEEDS}
EXPERIMENTS: dict[str, Experiment] = {
    "table9": Windows(
        "Table 9: keys and values per token and per channel",
        f"Integers without outliers, keys after RoPE. {PASS}",
        "LLaMA-7B, 3 bits: full cache 5.68, both per token 10.87, keys per channel and values per token 7.05, both per "
        "channel 223.",
        cells=by_bits(
            [
                ("keys and values per token", "kvquant", {**INT, "axis": "token", "pre_rope": False}),
                ("keys per channel, values per token", "kvquant", {**INT, "pre_rope": False}),
                ("keys and values per channel", "kvquant", {**INT, "pre_rope": False, "value_axis": "channel"}),
            ]
        ),
    ),
    "table10": Windows(
        "Table 10: keys before and after RoPE",
        f"Integers without outliers, keys per channel. {PASS}",
        "LLaMA-7B, 3 bits: after RoPE 7.05, before RoPE 6.23.",
        cells=by_bits([("after RoPE", "kvquant", {**INT, "pre_rope": False}), ("before RoPE", "kvquant", INT)]),
    ),
    "table11": Windows(
        "Table 11: codebooks and weights of k-means",
        f"No outliers. {PASS} {NO_SINK}",
        "LLaMA-7B, 3 bits: int 6.23, k-means without weights 6.84, nuq 5.94. nuq is better than nf by up to .33, and "
        "better than k-means without weights or without s². There are no figures at 2 bits.",
        cells=by_bits(
            [
                ("int", "kvquant", INT),
                ("nf", "kvquant", {**INT, "table": "nf"}),
                ("nuq, no weights", "kvquant", {"outliers": 0.0, "weights": "none"}),
                ("nuq, Fisher", "kvquant", {"outliers": 0.0, "weights": "fisher"}),
                ("nuq, Fisher × s²", "kvquant", {"outliers": 0.0}),
            ]
        ),
    ),
    "table12": Windows(
        "Table 12: outliers per matrix and per vector",
        f"{PASS} {NO_SINK}",
        "LLaMA-7B, 3 bits: no outliers 5.94, 1 % per matrix 5.85, 1 % per vector 5.75.",
        cells=by_bits(
            [
                ("no outliers", "kvquant", {"outliers": 0.0}),
                *(
                    (f"{_percent(share)} per {per}", "kvquant", {"outliers": share, "outliers_per": per})
                    for share in (0.001, 0.01)
                    for per in ("matrix", "vector")
                ),
            ]
        ),
    ),
    "table13": Windows(
        "Table 13: first token exact",
        "One forward pass per window of 2,048 tokens, with every key and value quantised. Where the first token is "
        "exact, calibration leaves out the first token of each sample. The first windows of wikitext-2 test.",
        "An exact first token helps at all bits, most at few bits and without outliers. LLaMA-7B, 2 bits, no outliers: "
        "8.47 without and 7.23 with it.",
        cells=_sinks(),
    ),
    "table14": Windows(
        "Table 14: ranges of keys offline and online",
        f"Online ranges are those of the window itself. {PASS} {NO_SINK}",
        "LLaMA-7B, 3 bits: no outliers 5.94 offline and 5.91 online, 1 % 5.75 in both cases.",
        cells=by_bits(
            [
                (f"{_percent(share)}, {ranges}", "kvquant", {"outliers": share, "ranges": ranges})
                for share in (0.0, 0.01)
                for ranges in ("offline", "online")
            ]
        ),
    ),
    "table17": Windows(
        "Table 17: data types, groups and outliers",
        f"int and nf quantise keys after RoPE per token. The paper's groups are of 128 channels (one head) and 64; "
        f"SmolLM2's heads have 64 channels. {PASS}",
        "nuq mostly beats int and nf, with and without groups; 0.1 to 1 % outliers help further. nuq with 1 % needs "
        "about the bits of int in groups of 64 and is better in all cases.",
        cells=by_bits(
            [
                *BASELINES,
                *GROUPS,
                *((f"nuq, {_percent(share)}", "kvquant", {"outliers": share}) for share in (0.0, 0.001, 0.005, 0.01)),
            ]
        ),
    ),
    "table18": Windows(
        "Tables 1 and 18: wikitext-2",
        f"The int rows with groups stand for the paper's ATOM and FlexGen (groups of one head and of half a head). "
        f"{PASS}",
        "LLaMA-7B at 4, 3, 2 bits (full cache 5.68): int per token 5.98, 10.87, 11779; nf per token 5.87, 7.33, 3210; "
        "ATOM 5.77, 6.17, 37.37; FlexGen 5.73, 5.93, 11.09; nuq 5.72, 5.87, 7.23; nuq with 1 % 5.69, 5.75, 6.01.",
        cells=by_bits([*BASELINES, *NUQ]),
    ),
    "table19": Windows(
        "Table 19: C4",
        "As Table 18, with the first windows of C4 (the paper: 256 random windows of its validation set).",
        "3 bits with 1 % outliers stay within .1 of the full cache on C4, too.",
        cells=by_bits([*BASELINES[:2], *NUQ], text=C4),
    ),
    "table20": Windows(
        "Table 20: keys per token, before and after RoPE",
        f"Integers without outliers. {PASS}",
        "Per token, keys are better after RoPE than before.",
        cells=by_bits(
            [
                ("after RoPE", "kvquant", {**INT, "axis": "token", "pre_rope": False}),
                ("before RoPE", "kvquant", {**INT, "axis": "token"}),
            ]
        ),
    ),
    "table21": Windows(
        "Table 21: corpus of calibration",
        "nuq with 1 % outliers, calibrated and scored on wikitext-2 and C4. The first windows of 2,048 tokens of "
        "each text. C4's windows and calibration samples come from the same file and may overlap.",
        "Nearly equal for both corpora and both texts.",
        cells=_corpora(),
    ),
    "figure3": Windows(
        "Figure 3: context length",
        "The same 16,384 tokens of wikitext-2 test, cut into windows of each length; calibrated as above. The paper's "
        "models have contexts of 32k tokens, SmolLM2 has 8k. At 4,096 tokens four windows were read.",
        "The distance to the full cache stays the same up to 32k tokens.",
        cells=_lengths(),
    ),
    "q_norm": Windows(
        "Q-Norm (§3.6 of an earlier version of the paper)",
        f"nuq with 1 % outliers. {PASS}",
        "Q-Norm helps at 2 bits; 3 and 4 bits do not need it.",
        cells=by_bits([("without", "kvquant", {}), ("with Q-Norm", "kvquant", {"q_norm": True})]),
    ),
    "samples": Windows(
        "Samples of calibration (ours)",
        f"nuq with 1 % outliers. {PASS} The seeds draw as many samples as other tables, at other places of the text.",
        "Not in the paper.",
        cells=tuple(
            cell for name, corpus in SAMPLES.items() for cell in by_bits([(name, "kvquant", {})], corpus=corpus)
        ),
    ),
}
