"""KVQuant's ablations (arXiv 2401.18079) on a small model: calibrate, evaluate, and write markdown
tables.

    python benchmarks/kvquant_tables.py --train train.txt --test test.txt --out folder    # all; takes hours
    python benchmarks/kvquant_tables.py … --tables 9,10 --windows 2                               # some

The texts are wikitext-2's train and test rows joined by two newlines. Perplexity is measured with
`simulate` and one sink, except in the table about sinks. Calibrations and records stay in the
folder, so a stopped run continues where it was. Tables are made from records alone; `--print` makes
them from existing records without running anything.
"""

from __future__ import annotations

from ablation import Row, Setting, Study

BITS = (4, 3, 2)
PAPER = {
    "9": "LLaMA-7B, 3 bits: per token 10.87; keys per channel lower it by 3.82; values per channel are worse.",
    "10": "LLaMA-7B, 3 bits: before RoPE the perplexity is 0.82 lower than after.",
    "11": "nuq is better than nf by up to 0.33, and better than k-means without weights or without s².",
    "12": "LLaMA-7B, 3 bits: 1 % per vector lowers it by 0.19, to less than 0.1 above fp16; per matrix is worse.",
    "13": "an exact first token helps at all bits, most at few bits and without outliers.",
    "14": "offline is slightly worse without outliers, and equal with 1 % outliers.",
    "17": "nuq mostly beats int and nf, with and without groups; 0.1 to 1 % outliers help further. LLaMA-7B at 4, 3, 2 "
    "bits (Table 18; fp16 5.68): int 5.98 / 10.87 / 11779, nf 5.87 / 7.33 / 3210, nuq 5.72 / 5.87 / 7.23, nuq with 1 % "
    "5.69 / 5.75 / 6.01.",
    "20": "keys per token are better after RoPE than before.",
    "21": "nearly equal for all corpora.",
    "q_norm": "helps at 2 bits; 3 and 4 bits do not need it.",
    "samples": "not in the paper.",
}
"""Statements of the paper about each table; perplexity is of wikitext-2."""
SHARES = ("0", "0.001", "0.005", "0.01")


def tables() -> dict[str, tuple[str, list[Row]]]:
    """Return every table, a title and rows, by its number in the paper."""
    made: dict[str, tuple[str, list[Row]]] = {}
    axes = [("per token, after RoPE", "axis=token,pre_rope=false"), ("per channel, after RoPE", "pre_rope=false")]
    made["9"] = (
        "Keys per token and per channel",
        [
            Row(f"{b} bits, keys {label}", f"kvquant:bits={b},{o},outliers=0,table=int")
            for b in BITS
            for label, o in axes
        ],
    )
    ropes = [("after RoPE", ",pre_rope=false"), ("before RoPE", "")]
    made["10"] = (
        "Keys before and after RoPE",
        [Row(f"{b} bits, {label}", f"kvquant:bits={b},outliers=0,table=int{o}") for b in BITS for label, o in ropes],
    )
    kinds = [
        *(("int", "table=int"), ("nf", "table=nf"), ("nuq, no weights", "weights=none")),
        *(("nuq, Fisher", "weights=fisher"), ("nuq, Fisher × s²", "weights=eq7")),
    ]
    made["11"] = (
        "Tables and weights",
        [Row(f"{b} bits, {label}", f"kvquant:bits={b},outliers=0,{o}") for b in BITS for label, o in kinds],
    )
    pers = [("per matrix", ",outliers_per=matrix"), ("per vector", "")]
    made["12"] = (
        "Outliers per matrix and per vector",
        [Row(f"{b} bits, 1 % {label}", f"kvquant:bits={b}{o}") for b in BITS for label, o in pers],
    )
    made["13"] = (
        "First token exact",
        [
            Row(f"{b} bits, {100 * float(s):g} %, {n} sinks", f"kvquant:bits={b},outliers={s}", Setting(sinks=n))
            for b in BITS
            for s in ("0", "0.01")
            for n in (0, 1)
        ],
    )
    ranges = [("offline", ""), ("online", ",ranges=online")]
    made["14"] = (
        "Ranges of keys offline and online",
        [Row(f"{b} bits, 1 %, {label}", f"kvquant:bits={b}{o}") for b in BITS for label, o in ranges],
    )
    made["17"] = (
        "Tables × outliers × bits, and integers and normal quantiles in groups of 64",
        [
            row
            for b in BITS
            for row in (
                *(
                    Row(f"{t}{b}, {100 * float(s):g} %", f"kvquant:bits={b},outliers={s},table={t}")
                    for t in ("int", "nf", "nuq")
                    for s in SHARES
                ),
                Row(f"int{b}, groups of 64 along the token", f"uniform:bits={b},group=64"),
                Row(f"nf{b}, groups of 64 along the token", f"normalfloat:bits={b},group=64,zero_point=true"),
            )
        ],
    )
    axes = [("after RoPE", "pre_rope=false"), ("before RoPE", "pre_rope=true")]
    made["20"] = (
        "Keys per token, before and after RoPE",
        [
            Row(f"{b} bits, keys per token {label}", f"kvquant:bits={b},axis=token,{o},outliers=0,table=int")
            for b in BITS
            for label, o in axes
        ],
    )
    made["21"] = (
        "Corpus of calibration",
        [
            Row(f"{b} bits, 1 %, {text}", f"kvquant:bits={b}", Setting(text=text))
            for b in BITS
            for text in ("train", "other")
        ],
    )
    norms = [("", ""), (", Q-Norm", ",q_norm=true")]
    made["q_norm"] = (
        "Q-Norm (§3.6)",
        [Row(f"{b} bits, 1 %{label}", f"kvquant:bits={b}{o}") for b in BITS for label, o in norms],
    )
    made["samples"] = (
        "Samples of calibration (ours)",
        [Row(f"{b} bits, 1 %, {n} × 2,048", f"kvquant:bits={b}", Setting(n)) for b in BITS for n in (1, 4, 16)],
    )
    return made


if __name__ == "__main__":
    Study(tables(), {name: f"Paper: {said}" for name, said in PAPER.items()}, "perplexity").main(__doc__)
