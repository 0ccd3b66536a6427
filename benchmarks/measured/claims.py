"""The papers' claims as data: where each is, what it says, and the rows of the records that it compares."""

from __future__ import annotations

import functools

from experiments import kvquant, qjl
from measured.verdicts import FULL, Claim

QJL = "QJL: orthogonal rows, 8 outliers, M = 2·D, 15 first layers"
RECALL = ("1k", "2k", "4k", "8k")
STEP, READ = (f"ms to {what}, one layer, {{name}} ({{size}})" for what in ("decode a token", "read the prompt"))
HEADS = {name: "/".join(map(str, shape)) for name, shape in qjl.SHAPES.items()}
PROJECTIONS = {name: f"{values:,}" for name, (*_, values) in kvquant.SHAPES.items()}


def _kl(table: str, where: str, says: str, first: str, second: str) -> Claim:
    return Claim("qjl", where, says, table, first, second, ("2048",), "kl")


_ablation, _alike = (functools.partial(_kl, table) for table in ("ablations", "like-for-like"))


def _layer(says: str, first: str, second: str, column: str, metric: str, margin: float = 0.0) -> Claim:
    return Claim("qjl", "Figure 3", says, "figure3", first, second, (column,), metric, margin, layers=HEADS)


def _perplexity(
    table: str, says: str, first: str, second: str, *columns: str, margin: float = 0.0, either: bool = False
) -> Claim:
    where = {"18": "Tables 1, 18", "q_norm": "§3.6, v1"}.get(table, f"Table {table}")
    experiment = table if table == "q_norm" else f"table{table}"
    columns = columns or ("3 bits",)
    return Claim("kvquant", where, says, experiment, first, second, columns, margin=margin, either=either)


def _passkeys(says: str, first: str, second: str, margin: float = 0.0) -> Claim:
    return Claim("kvquant", "Table 2", says, "table2", first, second, ("2k", "4k"), "accuracy", margin)


def _mean(table: str, says: str, first: str, second: str, margin: float = 0.0) -> Claim:
    return Claim("kvquant", f"Table {table}", says, f"table{table}", first, second, ("mean",), "accuracy", margin)


def _needles(says: str, first: str, second: str, margin: float = 0.0, **more: bool) -> Claim:
    return Claim("polarquant", "Figure 3", says, "figure3", first, second, RECALL, "recall", margin, **more)


def _lines(where: str, experiment: str, column: str) -> tuple[Claim, ...]:
    """Return the claims of SubGen's Table 1 in one setting: right answers, and the likelihood of the right answer."""
    orders = (("SubGen", "attention sinks"), ("SubGen", "H2O"), ("H2O", "attention sinks"))
    return (
        *(
            Claim("subgen", where, f"{a} answers better than {b}", experiment, a, b, (column,), "accuracy")
            for a, b in orders
        ),
        *(
            Claim("subgen", where, f"the answer is likelier with {a} than with {b}", experiment, a, b, (column,),
                  "gold_nll")
            for a, b in orders[:2]
        ),
    )  # fmt: skip


CLAIMS = {
    "qjl": (
        _ablation("§4.1", "orthogonal rows diverge less than i.i.d. rows", QJL, "i.i.d. rows"),
        _ablation("§4.1", "outlier channels lower the divergence", QJL, "no outliers"),
        _ablation("authors' code", "twice the rows in the first 15 layers lower the divergence", QJL,
                  "all layers alike"),
        _ablation("wide heads (ours)", "M = 750 without outlier channels diverges less than M = 2·D with 8",
                  "no outliers, M = 750, all layers alike", QJL),
        _alike("Table 1 (KL here)", "QJL as published diverges less than KIVI with 2 bits (3.00 with scales)",
               "QJL as published", "KIVI, 3.00 bits"),
        _alike("Table 1 (KL here)", "QJL with 3.00 bits diverges less than KIVI with 2 bits (3.00)",
               "QJL, 3.00 bits, rows 64 + 96", "KIVI, 3.00 bits"),
        Claim("qjl", "Table 1", "LongBench: QJL answers better than KIVI"),
        Claim("qjl", "Table 2", "lm-eval: QJL answers like the full cache"),
        _layer("QJL decodes faster than the full cache at 16k", "QJL", "exact", "16k", STEP),
        _layer("QJL decodes faster than 16-bit tokens read by our kernels at 16k", "QJL", "exact, our kernels", "16k",
               STEP),
        _layer("QJL decodes faster than KIVI at 16k", "QJL", "KIVI, 2 bits", "16k", STEP),
        _layer("QJL decodes faster than KVQuant at 16k", "QJL", "KVQuant, 4 bits, 1 %", "16k", STEP),
        _layer("QJL slows a prompt of 1k by less than 10 %", "QJL", "exact", "1k", READ, 0.1),
        _layer("QJL reads a prompt of 1k faster than KVQuant", "QJL", "KVQuant, 4 bits, 1 %", "1k", READ),
    ),
    "kvquant": (
        _passkeys("2 bits with 1 % find more passkeys than KIVI with 2 bits", "nuq2, 1 %", "KIVI, 2 bits"),
        Claim("kvquant", "Table 2, question unknown (ours)", "2 bits with 1 % find more passkeys than KIVI with 2 bits",
              "table2-unseen", "nuq2, 1 %", "KIVI, 2 bits", ("2k",), "accuracy"),
        _passkeys("2 bits with 1 % lose at most 2 in 100 passkeys", "nuq2, 1 %", FULL, 0.02),
        _passkeys("3 bits with 1 % lose at most 2 in 100 passkeys", "nuq3, 1 %", FULL, 0.02),
        _mean("3", "LongBench: 3 bits with 1 % answer better than KIVI with 2", "nuq3, 1 %", "KIVI, 2 bits"),
        _mean("4", "RULER: 3 bits with 1 % lose less than .0275", "nuq3, 1 %", FULL, 0.0275),
        _mean("4", "RULER: 3 bits with 1 % answer better than KIVI with 2", "nuq3, 1 %", "KIVI, 2 bits"),
        _mean("4", "RULER: KIVI with 2 bits answers better than 2 bits with 1 %", "KIVI, 2 bits", "nuq2, 1 %"),
        Claim("kvquant", "Table 5", "weights of 4 bits do not change the loss"),
        Claim("kvquant", "Tables 6, 22", "kernels on a GPU"),
        Claim("kvquant", "Table 15", "a token's thresholds take less time than its projections", "table15",
              "{name}, thresholds online ({size} values)", "{name}, projections of Q, K and V", ("1 thread",),
              "microseconds", layers=PROJECTIONS),
    ),
    "subgen": (
        *(
            Claim("subgen", "Figure 1", f"keys have the smaller {metric}, {n} centers", "figure1", "keys", "values",
                  (f"{n} centers",), metric)
            for metric in ("k-center radius", "mean distance")
            for n in (16, 64)
        ),
        *_lines("Table 1", "table1", "10 lines in 13/20"),
        Claim("subgen", "Table 1", "SubGen loses at most 12 in 100 answers (.86, .98)", "table1", "SubGen", FULL,
              ("10 lines in 13/20",), "accuracy", 0.12),
        *_lines("Table 1, question unknown (ours)", "table1-unseen", "10 lines in 13/20"),
        *_lines("Table 1, shorter wording (ours)", "table1-pairs", "20 lines in 1/2 after the prompt"),
        *(
            Claim("subgen", "§3.2 (ours)", f"k-center diverges less than Algorithm 1, {part} of the bytes",
                  "algorithm1", f"k-center, {part}", f"Algorithm 1, {part}", ("1024",), "kl")
            for part in ("1/2", "1/4")
        ),
    ),
    "polarquant": (
        _needles("rotated loses at most .01 of recall", "PolarQuant, rotated", FULL, 0.01),
        _needles("rotated and not rotated are within .01", "PolarQuant, rotated", "PolarQuant, not rotated", 0.01,
                 either=True),
        _needles("rotated recalls more than KIVI with 2 bits", "PolarQuant, rotated", "KIVI, 2 bits"),
        _needles("rotated recalls more than SnapKV", "PolarQuant, rotated", "SnapKV", same_bytes=True),
        _needles("rotated recalls more than PyramidKV", "PolarQuant, rotated", "PyramidKV", same_bytes=True),
        _needles("PyramidKV recalls more than SnapKV", "PyramidKV", "SnapKV", same_bytes=True),
        Claim("polarquant", "Table 1", "LongBench: rotated answers better than not rotated, and than KIVI"),
        _alike("§4.1 (KL here)", "rotated diverges less than not rotated", "PolarQuant",
               "PolarQuant, not rotated"),
        _alike("Figure 3 (KL here)", "rotated diverges less than KIVI with 2 bits (3.00)", "PolarQuant",
               "KIVI, 3.00 bits"),
        _alike("§4.1 (KL here)", "online codebooks diverge less than offline ones", "PolarQuant, online",
               "PolarQuant"),
        Claim("polarquant", "Table 2", "generates faster than KIVI", "table2", "PolarQuant, offline", "KIVI, 2 bits",
              ("generation, s",), "seconds"),
        Claim("polarquant", "Table 2", "generates faster than 16-bit tokens read by our kernels", "table2",
              "PolarQuant, offline", "exact, our kernels", ("generation, s",), "seconds"),
        Claim("polarquant", "Table 2", "generates in at most 15 % more time than the full cache", "table2",
              "PolarQuant, offline", FULL, ("generation, s",), "seconds", 0.15),
        Claim("polarquant", "Table 2", "online reads a prompt more slowly than offline", "table2",
              "PolarQuant, offline", "PolarQuant, online", ("prefill, s",), "seconds"),
    ),
}  # fmt: skip
"""Claims on the page of all papers."""
NUQ, NUQ_1 = "nuq, Fisher × s²", "nuq, 1 %"
PERPLEXITIES = (
    _perplexity("18", "3 bits with 1 % lose less than 1.8 % (.1 of 5.68)", NUQ_1, FULL, margin=0.018),
    _perplexity("18", "4 bits with 1 % lose less than .2 % (.01 of 5.68)", NUQ_1, FULL, "4 bits", margin=0.002),
    _perplexity("18", "2 bits with 1 % lose less than 6 % (.33 of 5.68)", NUQ_1, FULL, "2 bits", margin=0.06),
    _perplexity("19", "3 bits with 1 % lose less than 1.8 % on C4", NUQ_1, FULL, margin=0.018),
    _perplexity("18", "nuq is better than int per token", "nuq", "int per token"),
    _perplexity("18", "nuq is better than nf per token", "nuq", "nf per token"),
    _perplexity("18", "nuq with 1 % is better than int in groups of a head (ATOM)", NUQ_1,
                "int, groups of 64 (one head)"),
    _perplexity("18", "nuq with 1 % is better than int in groups of half a head (FlexGen)", NUQ_1,
                "int, groups of 32 (half a head)"),
    _perplexity("9", "keys per channel, values per token: better than both per token",
                "keys per channel, values per token", "keys and values per token"),
    _perplexity("9", "both per token is better than both per channel", "keys and values per token",
                "keys and values per channel"),
    _perplexity("9", "values per token are better than per channel, keys per channel",
                "keys per channel, values per token", "keys and values per channel"),
    _perplexity("10", "keys before RoPE are better than after", "before RoPE", "after RoPE"),
    _perplexity("11", "nuq is better than int", NUQ, "int"),
    _perplexity("11", "nuq is better than nf", NUQ, "nf"),
    _perplexity("11", "weights help k-means", NUQ, "nuq, no weights"),
    _perplexity("11", "Fisher × s² is better than Fisher alone", NUQ, "nuq, Fisher"),
    _perplexity("11", "k-means without weights is worse than int (6.84, 6.23)", "int", "nuq, no weights"),
    _perplexity("12", "1 % per vector is better than 1 % per matrix", "1 % per vector", "1 % per matrix"),
    _perplexity("12", "1 % of outliers helps (Table 17, too)", "1 % per vector", "no outliers"),
    *(
        _perplexity("13", f"an exact first token helps at 2 bits with {outliers} %", f"{outliers} %, first token exact",
                    f"{outliers} %, no token exact", "2 bits")
        for outliers in (0, 1)
    ),
    _perplexity("14", "online and offline ranges are within 1 %, no outliers", "0 %, offline", "0 %, online",
                margin=0.01, either=True),
    _perplexity("14", "online and offline ranges are within 1 %, 1 % outliers", "1 %, offline", "1 %, online",
                margin=0.01, either=True),
    _perplexity("20", "per token, keys after RoPE are better than before", "after RoPE", "before RoPE"),
    _perplexity("21", "wikitext-2: the corpora are within 1 %", "calibrated on wikitext-2", "calibrated on C4",
                "wikitext-2, 3 bits", margin=0.01, either=True),
    _perplexity("21", "C4: the corpora are within 1 %", "calibrated on wikitext-2", "calibrated on C4", "C4, 3 bits",
                margin=0.01, either=True),
    Claim("kvquant", "Figure 3", "512 and 2,048 tokens lose the same within 1 %", "figure3", "nuq3, 1 %",
          "nuq3, 1 %", ("512",), margin=0.01, either=True, other=("2,048",)),
    _perplexity("q_norm", "Q-Norm helps at 2 bits", "with Q-Norm", "without", "2 bits"),
)  # fmt: skip
"""Claims on the page of KVQuant's perplexity tables, at 3 bits unless they say otherwise."""
