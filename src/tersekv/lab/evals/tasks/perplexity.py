"""Perplexity of a text: how well the model predicts each next token.

A sample is a window of `context` tokens:

    " Robert Boulter is an English film, television and theatre actor. He had a guest @-@ starring role …"

Source: GPTQ's `datautils.py` and `llama.py` (arXiv 2210.17323), copied by KVQuant (arXiv
2401.18079).

- The whole text is tokenised once. A BOS token is only at the very start, if the tokenizer adds
  one.
- It is cut into non-overlapping windows; the remainder is dropped.
- Perplexity is exp of the mean over windows of their mean cross-entropy. It covers all predicted
  tokens; the first token of a window is not predicted.

For their WikiText-2 result the text is the test split's rows joined by two newlines. Results of
other variants (strides, `<unk>`, per word) are not comparable.

mode=cache (the default) reads through the real cache. With `prefix` P, the first P tokens are
packed after one exact prefill. Predictions of tokens P + 1 onwards are scored, all made over packed
tokens.

mode=simulate quantises every key and value in one forward pass, as KVQuant does. Only the first
`sinks` tokens stay exact. Its results are far worse than those of a cache in use.
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
    """Perplexity task. Its options are those of `WindowTask`."""

    def evaluate(self, sample: Sample, reader: Reader, full: Reader) -> Result:
        """Measure `nll`, the mean over the window's scored tokens, in nats."""
        logits, footprint = self.logits(sample, reader)
        return Result({"nll": mean_nll(logits, sample.data[0, self.prefix :])}, sample.data.shape[1], footprint)

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """Return perplexity = exp(mean nll), perplexity_ratio to the full cache, and nll.

        The standard errors of the first two use the delta method. The ratio's is computed from
        differences on the same windows, which vary far less than the windows do.
        """
        nll = Estimate.of([m["nll"] for m in metrics])
        more = Estimate.of([m["nll"] - f["nll"] for m, f in zip(metrics, full, strict=True)])
        return {"perplexity": _exp(nll), "perplexity_ratio": _exp(more), "nll": nll}


def mean_nll(logits: Tensor, ids: Tensor) -> float:
    """Return the mean cross-entropy, in nats, of ids [T] except the first, under logits [T,
    vocabulary]."""
    predicting, targets = logits[:-1], ids[1:].to(logits.device)
    total = 0.0
    for part, wanted in zip(predicting.split(POSITIONS_AT_A_TIME), targets.split(POSITIONS_AT_A_TIME), strict=True):
        total += F.cross_entropy(part.float(), wanted, reduction="sum").double().item()
    return total / len(targets)


def _exp(x: Estimate) -> Estimate:
    mean = math.exp(x.mean) if x.mean < 700 else math.inf
    return Estimate(mean, mean * x.stderr)


TASK = Perplexity
