"""Perplexity of a text: how well the model foretells each next token.

An instance is a window of `context` tokens:

    " Robert Boulter is an English film, television and theatre actor. He had a guest @-@ starring role …"

Protocol: GPTQ's `datautils.py` and `llama.py` (arXiv 2210.17323), which KVQuant (arXiv 2401.18079) copied: the whole
text is tokenised once (a BOS stands at the very start only, and only where the tokenizer puts one there), cut into
non-overlapping windows whose remainder is dropped, and perplexity is exp of the mean of the windows' mean
cross-entropies over all predicted tokens, each window's first one excluded. For their WikiText-2 figure the text is
the test split's rows joined by two newlines. Figures of other variants (strides, `<unk>`, per word) do not compare.

mode=cache (the default) reads through the real cache; with `prefix` P the first P tokens are packed from one exact
prefill, and what is scored is the prediction of tokens P + 1 on, which all have been made over packed tokens.
mode=simulate codes every key and value in one forward pass, as KVQuant does, so no token stays exact but the first
`sinks`; its figures are far worse than those of a cache in use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from tersekv.lab.evals.tasks.base import Estimate, Result, Sample
from tersekv.lab.evals.windows import POSITIONS_AT_A_TIME, WindowTask

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader


@dataclass(frozen=True)
class Perplexity(WindowTask):
    """Options are those of `WindowTask`."""

    def evaluate(self, sample: Sample, reader: Reader, full: Reader) -> Result:
        """`nll`: mean over the window's scored tokens, in nats."""
        logits, footprint = self.logits(sample, reader)
        return Result({"nll": mean_nll(logits, sample.data[0, self.prefix :])}, sample.data.shape[1], footprint)

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """perplexity = exp(mean nll), its standard error by the delta method; perplexity_ratio to the full cache, from
        the differences on the same windows, which vary far less than the windows do."""
        nll = Estimate.of([m["nll"] for m in metrics])
        more = Estimate.of([m["nll"] - f["nll"] for m, f in zip(metrics, full, strict=True)])
        return {"perplexity": _exp(nll), "perplexity_ratio": _exp(more), "nll": nll}


def mean_nll(logits: Tensor, ids: Tensor) -> float:
    """Mean cross-entropy, in nats, of ids [T] but the first under logits [T, vocabulary]."""
    predicting, targets = logits[:-1], ids[1:].to(logits.device)
    total = 0.0
    for part, wanted in zip(predicting.split(POSITIONS_AT_A_TIME), targets.split(POSITIONS_AT_A_TIME), strict=True):
        total += F.cross_entropy(part.float(), wanted, reduction="sum").double().item()
    return total / len(targets)


def _exp(x: Estimate) -> Estimate:
    mean = math.exp(x.mean) if x.mean < 700 else math.inf
    return Estimate(mean, mean * x.stderr)


TASK = Perplexity
