"""Experiments of PolarQuant (arXiv 2502.02617)."""

from __future__ import annotations

from experiments.base import MEASURED_DEFAULT, Experiment, Measured, Questions, Result, Setting
from experiments.kvquant import ROWS as KVQUANT
from experiments.qjl import LATEST
from tersekv.lab.bench import generate
from tersekv.recipe import Recipe

PROMPT = "window:sinks=0,recent=0,start=0,generated=exact+"
"""All tokens of the prompt are packed; generated tokens stay exact (§5.3)."""
QUARTER = {
    "PolarQuant, rotated": f"{PROMPT}polarquant",
    "PolarQuant, not rotated": f"{PROMPT}polarquant:rotation=none",
    "KIVI, 2 bits": "window:sinks=0,recent=128+kivi:bits=2",
    "KIVI, 4 bits": "window:sinks=0,recent=128+kivi:bits=4",
    "SnapKV": "snapkv:sinks=0,budget=0.25+exact",
    "PyramidKV": "pyramidkv:sinks=0,budget=0.25+exact",
    "HeadKV, a quarter": "headkv:sinks=0,budget=0.25+exact",
    "StreamingLLM": "streaming:budget=0.25+exact",
    "default": MEASURED_DEFAULT,
}
"""Caches of a quarter of the bytes (§5.2), but for KIVI with 4 bits."""
ONCE = (
    "The whole prompt is read exactly, then packed or reduced to a quarter, then the answer is generated (`--pack "
    "after-prompt`)."
)

TIMED = {
    "exact, our kernels": "exact",
    "PolarQuant, offline": f"{PROMPT}polarquant",
    "PolarQuant, online": f"{PROMPT}polarquant:codebook=online",
    **{name: QUARTER[name] for name in ("KIVI, 2 bits", "SnapKV", "PyramidKV", "StreamingLLM", "default")},
}

RECURSIONS = ("3-3-3-3-3-3", "4-2-2-2-2-2", "4-3-2-2-2-2", "4-3-3-3-3-3", "4-3-2-2")
"""Bits of each level: full recursions of 3.25 to 3.75 bits at head dim 64, and four levels of 4.125."""


def times(setting: Setting) -> list[Result]:
    """Time a prompt and greedy decoding after it with each cache, in turns.

    Options: `prompt` and `new_tokens` in tokens, `rounds`.
    """
    options = {"prompt": "16384", "new_tokens": "1024", "rounds": "3"} | setting.options
    prompt, new_tokens, rounds = (int(options[name]) for name in ("prompt", "new_tokens", "rounds"))
    model, tokenizer = setting.loaded
    names = {str(Recipe.parse(recipe)): label for label, recipe in setting.chosen(TIMED).items()}
    found = []
    for one in generate.run(
        model, tokenizer, list(names), [prompt], new_tokens=new_tokens, rounds=rounds, report=lambda text: print(text)
    ):
        label = names.get(one.cache, "full cache")
        seconds = [step * new_tokens / 1e3 for step in one.step_ms]
        for column, values in (("prefill, s", one.prefill_seconds), ("generation, s", seconds)):
            held = {"bits": one.bits_per_element, "bytes": one.bytes, "recipe": one.cache}
            found.append(Result.of_times(label, column, "seconds", values, **held))
    return found


EXPERIMENTS: dict[str, Experiment] = {
    "figure3": Questions(
        "Figure 3: needle in a haystack",
        f"Fu et al.'s needle, question and score (recall), ten depths. {ONCE} KIVI with 4 bits holds 1.1 to 1.3 times "
        "PolarQuant's bytes.",
        "(Second-hand.) Llama-3.1-8B, 4k to 104k: full cache .995, PolarQuant .991, rotated .990, KIVI .984, PyramidKV "
        ".891, SnapKV .858.",
        task="needle",
        options={"pack": "after-prompt", "depths": "0,11,22,33,44,56,67,78,89,100"},
        values=("4k", "8k", "16k", "32k", "64k", "104k"),
        rows={**QUARTER, "QJL": f"{LATEST}qjl", "KVQuant, 2 bits, 1 %": KVQUANT["nuq2, 1 %"]},
        samples=1,
        metrics=("recall",),
        mean=True,
    ),
    "table2": Measured(
        "Table 2: time to read a prompt and to generate",
        "A prompt of 16k tokens, 1,024 generated. Each cache reads the prompt itself; all take turns, medians of the "
        "rounds. PolarQuant keeps generated tokens exact (§5.3).",
        "(Second-hand.) Llama-3.1-8B, seconds to read / generate: full cache 2.9 / 38.4, PolarQuant offline 3.4 / "
        "44.1, online 11.6 / 44.4, KIVI 3.6 / 49.6, SnapKV 3.4 / 34.1.",
        measure=times,
    ),
    "table1": Questions(
        "Table 1: LongBench",
        f"Prompts cut to 31k tokens. {ONCE}",
        "(Second-hand.) Mean, Llama-3.1-8B: full cache 48.63; PolarQuant rotated, online codebooks 48.37, offline "
        "48.29; not rotated 48.11; KIVI 46.70; SnapKV 44.57; PyramidKV 44.03; StreamingLLM 38.36.",
        task="longbench",
        options={"pack": "after-prompt", "length": "31k", "data": "{data}/longbench"},
        axis="subtasks",
        values=("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "trec", "triviaqa", "lcc"),
        rows={**QUARTER, "PolarQuant, online": f"{PROMPT}polarquant:codebook=online"},
        samples=200,
        mean=True,
    ),
    "recursion": Questions(
        "§4: the full recursion, and four levels",
        "wikitext-2 test: 2,048 tokens are read exactly and packed, the next 256 are scored. Four sinks and the latest "
        "128 to 159 tokens are exact and count as bits. A recipe names the bits of each level; six levels are the full "
        "recursion at head dim 64, seven at 128.",
        "(Second-hand.) No quality is given. All levels with 3 bits at head dim 128: “4.008 times” less memory (§4). "
        "The formula there, 16 + 127·3 bits for 128 numbers, gives 5.16 times. Four levels: 3.875 bits, 4.13 times "
        "(§4.1).",
        task="divergence",
        options={"text": "{data}/wikitext-2/test_gptq_joined.txt", "mode": "cache", "context": "2304", "chunk": "64"},
        axis="prefix",
        values=("2048",),
        rows={"4-2-2-2": "polarquant", **{bits: f"polarquant:bits={bits}" for bits in RECURSIONS}},
        samples=8,
        count="windows",
        metrics=("kl", "perplexity_ratio"),
    ),
}
