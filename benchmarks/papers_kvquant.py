"""Experiments of KVQuant (arXiv 2401.18079)."""

from __future__ import annotations

from experiment import MEASURED_DEFAULT, Experiment, Questions

FIRST = "window:sinks=1,recent=0,start=0+"
"""The paper's tokens: the first is exact (§3.5), all others are packed."""
ROWS = {f"nuq{bits}, 1 %": f"{FIRST}kvquant:bits={bits}" for bits in (4, 3, 2)}
ROWS |= {"KIVI, 2 bits": "window:sinks=0,recent=128+kivi:bits=2", "default": MEASURED_DEFAULT}
PACKED = (
    "The whole prompt is read exactly, then packed, then the answer is generated (Appendix M; `--pack after-prompt`). "
    "The authors' script of passkeys quantises while it reads: `--option pack=during-prefill`. The first token is "
    "exact; KIVI keeps its 128 latest tokens."
)
LONGBENCH = (
    *("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum"),
    *("multi_news", "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
RULER = (
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)

EXPERIMENTS: dict[str, Experiment] = {
    "table2": Questions(
        "Table 2: passkey retrieval",
        f"50 samples per length. {PACKED}",
        "Llama-2-7B-32K, 2k to 32k: nuq4-1 % 1.0, nuq3-1 % .98 to 1.0, nuq2-1 % .98 to 1.0, KIVI with 2 bits .68 to "
        ".76.",
        task="passkey",
        options={"pack": "after-prompt"},
        values=("2k", "4k", "8k", "16k", "32k"),
        rows=ROWS,
    ),
    "table3": Questions(
        "Table 3: LongBench",
        f"All samples of each set, prompts cut to 31k tokens. {PACKED}",
        "Mean, Llama-2-7B-32K: full cache 31.96, nuq3-1 % 31.21, KIVI with 2 bits 30.04.",
        task="longbench",
        options={"pack": "after-prompt", "length": "31k", "data": "{data}/longbench"},
        axis="subtasks",
        values=LONGBENCH,
        rows=ROWS,
        samples=500,
        mean=True,
    ),
    "table4": Questions(
        "Table 4: RULER",
        f"All 13 tasks at 32k tokens, 500 samples each. {PACKED}",
        "Mean at 32k: full cache 56.40, nuq3-1 % 53.65, nuq2-1 % 36.54.",
        task="ruler",
        options={"pack": "after-prompt", "lengths": "32k", "data": "{data}/ruler"},
        axis="subtasks",
        values=RULER,
        rows=ROWS,
        samples=500,
        mean=True,
    ),
}
