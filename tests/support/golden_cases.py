"""Cases of the golden hashes: a few that are committed, and the matrix of recipes and stories."""

from __future__ import annotations

from golden_feeding import Case

LONG = "150 1x9 crop60 1x40 45 rows1,0,1 1x5 save 1x34 copy 64 crop40 9 w3 1x2 d2 record 70 crop9 1x25"
"""A story for policies that keep all tokens."""

LATE = "1x52 33 1x20 crop5 save 1x15 crop 70 1x3 repeat2 90 rows3,1 crop29 pickle 1x33"
"""A story that begins with single tokens."""

EVICTS = "200 1x7 crop5 40 rows1,0,1 1x10 save 1x36 copy 9 w1 crop3 150 1x3 pickle 33 1x2"
"""A story for policies that evict tokens."""

CASES = [
    Case("window:recent=16+kivi:bits=2", LONG, ragged=True),
    Case("window:recent=20,found=5+kivi:bits=4", LONG, ragged=True),
    Case("window:recent=16,sinks=6,generated=exact,exact=fp32+uniform:axis=channel,group=0", LATE, ragged=True),
    Case("window:recent=16,bias_correction=full+kivi:bits=2,pre_rope=true", LATE, ragged=True, exact=False),
    Case("window:recent=16+kivi:bits=2;1=exact", "300 crop158 crop157 1x40 33", "bfloat16", handles=False),
    Case("window:recent=0,sinks=0,start=0+kivi:bits=2",
         "nan20 2500 nan40 1x4 huge70 1x34 rows1,0 offload 600 1x2", "bfloat16"),
    Case("window:recent=16+kivi:bits=4", "150 1x34 crop5 45 rows1,0,1 1x20 reset 90", dim=64, shares="tokens"),
    Case("window:recent=16,found=9+uniform:bits=3,group=16", "200 1x36 crop60 1x20", shares="heads"),
    Case("mixed:recent=16+kivi:bits=4", LATE, ragged=True),
    Case("mixed:recent=16,reread=true,budget=0.5,rest=1,bias_correction=half+kivi:bits=4,pre_rope=true",
         "again300 1x40 save 40 1x40", ragged=True, exact=False),
    Case("mixed:recent=16,allot=model+kivi:bits=4/uniform:bits=4", LATE),
    Case("snapkv:budget=0.5,recent=16,pool=max,bias_correction=full+kivi:bits=2", EVICTS, ragged=True),
    Case("h2o:budget=96,recent=16,rest=2+kivi:bits=4", EVICTS, ragged=True),
    Case("h2o:memory=260KB,recent=16,evict=block,score=mean+uniform:axis=channel,group=0", EVICTS),
    Case("headkv:budget=0.4,recent=16,rest=2,rest_share=0.3+kivi:bits=4", EVICTS, ragged=True),
    Case("pyramidkv:budget=96,recent=16,window=16+kivi:bits=2", EVICTS, dim=64),
    Case("streaming:budget=96,recent=16+kivi:bits=4,pre_rope=true", EVICTS, ragged=True, exact=False),
    Case("streaming:budget=96,recent=16,rest=2,evict=block+kivi:bits=4",
         "200 nan40 1x4 huge70 1x34 offload 50 1x1", "bfloat16"),
    Case("subgen:budget=96,recent=16+kivi:bits=2", EVICTS, "bfloat16"),
    Case("subgen:variant=stream,budget=96,recent=16+kivi:bits=4", EVICTS, ragged=True),
]  # fmt: skip
"""Committed cases. Their codecs and inputs need no product that rounds, unless `exact` is False."""

SHORT = "200 1x36 crop5 40 1x3"

STORIES = {
    "whole": "300 1x3 70 w1 save 1x2",
    "parts": "40 120 9 1 90 33 1x5 31 1x1 64",
    "ones": "1x90 33 1x40 crop5 1x8",
    "crop": "100 1x6 crop4 1x3 crop 120 1x34 crop9 50 crop60 1x10 w5 reset 60 1x1",
    "beams": "180 rows1,0,1 1x20 40 repeat2 1x14 rows0,3 d3 1x3 64",
    "save": "200 1x3 save 1x34 64 copy 1x3 pickle 33 save 1x1",
    "draft": "record 230 5 crop3 1x2 6 crop6 100 40 crop90 1x40",
    "fault": "nan20 150 nan40 1x4 huge70 1x34 huge1 offload 1x40 50 1x1",
}

RATED = ["kivi:bits=4", "trellis:bits=3.5,calibration=prompt", "uniform:bits=4,group=16/turboquant:bits=4"]
"""Codecs that have several rates."""

CODECS = [
    *RATED,
    "kivi:bits=2",
    "uniform:axis=channel,group=0",
    "normalfloat:group=32/exact",
    "polarquant",
    "qjl",
    "kvquant:calibration=prompt",
    "kivi:bits=4,pre_rope=true",
    "kivi:bits=4,centre=true",
    "kvarn:tile=64",
    "kivi:bits=2;1=exact",
    "exact",
]
"""Codecs of every layout of pages, with rates by layer and with RoPE removed."""

KEEPING = [
    "window:recent=16",
    "window:recent=0,sinks=0,start=0",
    "window:recent=16,found=5",
    "window:recent=16,generated=exact",
    "window:recent=16,bias_correction=full",
    "window:recent=20,sinks=7,exact=fp32",
]

TWO_RATES = [
    "mixed:recent=16",
    "mixed:recent=16,budget=0.5,rest=1,bias_correction=half",
    "mixed:recent=16,allot=model",
    "mixed:recent=16,allot=prompt",
    "snapkv:budget=0.5,recent=16,rest=2",
    "h2o:budget=96,recent=16,rest=2",
    "h2o:memory=300KB,recent=16,rest=2,evict=block",
    "headkv:budget=0.4,recent=16,rest=2,rest_share=0.3",
    "pyramidkv:budget=96,recent=16,window=16,rest=1",
    "streaming:budget=96,recent=16,rest=2",
    "subgen:budget=96,recent=16,rest=2",
]

EVICTING = [
    "snapkv:budget=96,recent=16,window=8",
    "snapkv:budget=0.5,recent=16,pool=max,bias_correction=full",
    "h2o:budget=96,recent=16",
    "h2o:budget=96,recent=16,evict=block,score=mean",
    "h2o:budget=0.3,recent=16,sinks=0,heavy=1,bias_correction=half",
    "headkv:budget=96,recent=16",
    "pyramidkv:budget=96,recent=16,window=16",
    "streaming:budget=96,recent=16",
    "streaming:memory=300KB,recent=16,evict=block",
    "subgen:budget=96,recent=16",
    "subgen:variant=stream,budget=96,recent=16",
    "subgen:variant=stream,budget=96,recent=0,sinks=0,delta=150,slots=2",
]

REFUSED = [
    "snapkv:memory=1MB",
    "mixed:budget=0.5,allot=model",
    "subgen:variant=stream,rest=2",
    "subgen:variant=stream,bias_correction=full",
]
"""Policies that exclude one of their options."""


def matrix() -> list[Case]:
    """Return the cases of the matrix. Codecs, dtypes and padding take turns, so that pairs of them meet."""
    policies = [(policy, CODECS) for policy in (*KEEPING, *EVICTING)] + [(policy, RATED) for policy in TWO_RATES]
    dtypes = ("float32", "bfloat16")
    cases = list(CASES)
    for i, (policy, codecs) in enumerate(policies):
        recipes = [f"{policy}+{codecs[(3 * i + j) % len(codecs)]}" for j in range(len(STORIES))]
        for j, (recipe, story) in enumerate(zip(recipes, STORIES.values(), strict=True)):
            cases.append(Case(recipe, story, dtypes[(i + j) % 2], (i + j // 2) % 2 == 1))
        cases.append(Case(recipes[5], STORIES["parts"], dtypes[i % 2], i % 4 > 1, 64))
        cases.append(Case(f"{policy}+kivi:bits=4", STORIES["parts"], ragged=i % 2 == 1, backend="reference"))
        cases += [Case(recipes[1], SHORT, shares=shares) for shares in ("tokens", "heads")]
        cases.append(Case(recipes[2], SHORT, handles=False))
    for i, codec in enumerate(CODECS):
        cases.append(Case(f"{KEEPING[0]}+{codec}", LONG, dtypes[i % 2], i % 3 > 0))
        cases.append(Case(f"{EVICTING[(2, 9)[i % 2]]}+{codec}", EVICTS, dtypes[i // 2 % 2], i % 3 > 0))
    cases.append(Case(f"mixed:recent=16,reread=true+{RATED[1]}", "again300 1x40 40", ragged=True))
    cases += [Case(f"{policy}+kivi:bits=4", "40") for policy in REFUSED]
    cases += [Case(f"{policy}+qjl", "40") for policy in TWO_RATES]
    return list({case.name: case for case in cases}.values())
