"""KL divergence of the next-token distributions from those of the full cache.

A sample is a window of text, the same as for perplexity. At each position:

    full cache  P = {" the": .61, " a": .22, …}        packed cache  Q = {" the": .58, " a": .25, …}
    kl = Σ P·ln(P/Q) = .003 nats                       top1_agreement = 1 (both say " the")

The Kullback-Leibler divergence needs no labels and changes before any score does. llama.cpp's
`perplexity --kl-divergence` reports it for quantised weights ("Mean KLD", "Same top p").

Metrics are means over the positions of a window. kl_q1 to kl_q4 are means over its quarters and
show growth with the position. kl_p99 is the 99th percentile over its positions. Standard errors are
over windows. The same logits also give perplexity's metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tersekv.lab.evals.tasks.base import Estimate, Result, Sample
from tersekv.lab.evals.tasks.perplexity import Perplexity, mean_nll
from tersekv.lab.evals.windows import POSITIONS_AT_A_TIME, WindowTask

if TYPE_CHECKING:
    from tersekv.lab.evals.reader import Reader

QUARTERS = 4

LIKELY = 256
"""Number of tokens of a step whose probabilities `AnswerDivergence` keeps."""

WORDS = (
    (0.01, "hardly a token changes"),
    (0.1, "about one token in ten changes"),
    (0.3, "about one token in five changes"),
)
"""Divergences in nats below which these words hold. Above them the model is ruined. On three models, 96, 88 and 80 %
of the next tokens are the same in these ranges (docs/measured/quality.md#what-a-divergence-means)."""

LEAST_SAME = 0.96
"""Share of equal next tokens from which on hardly a token changes."""


@dataclass(frozen=True)
class Divergence(WindowTask):
    """KL divergence task. Its options are those of `WindowTask`; positions in `prefix` are not
    counted."""

    @property
    def more(self) -> tuple[str, ...]:
        """The quarters, the 99th percentile, and nll, which perplexity reports as well."""
        return ("nll", "kl_p99", *(f"kl_q{i}" for i in range(1, QUARTERS + 1)))

    def evaluate(self, sample: Sample, reader: Reader, full: Reader) -> Result:
        """Measure `kl` in nats, `top1_agreement`, `kl_p99`, `kl_q1` … `kl_q4`, and perplexity's `nll`."""
        logits, footprint = self.logits(sample, reader)
        kl, agree = compare(self.logits(sample, full)[0], logits)
        quarters = kl.tensor_split(QUARTERS)
        metrics = {"kl": kl.mean().item(), "top1_agreement": agree.mean().item()}
        metrics["kl_p99"] = kl.quantile(0.99).item()
        metrics["nll"] = mean_nll(logits, sample.data[0, self.prefix :])
        metrics |= {f"kl_q{i}": part.mean().item() for i, part in enumerate(quarters, 1) if len(part)}
        return Result(metrics, sample.data.shape[1], footprint)

    def summarise(self, metrics: Sequence[dict[str, float]], full: Sequence[dict[str, float]]) -> dict[str, Estimate]:
        """Return the means, and perplexity's metrics."""
        return super().summarise(metrics, full) | Perplexity().summarise(metrics, full)


def in_words(kl: float, agreement: float | None = None) -> str:
    """Describe a mean divergence in nats.

    agreement: share of positions with the same most likely token, if it was measured. It takes the place of
    the usual share in the words.
    """
    words = next((words for limit, words in WORDS if kl < limit), "RUINED: choose another recipe")
    if agreement is None or not kl < WORDS[-1][0] or (words == WORDS[0][1] and agreement >= LEAST_SAME):
        return words
    return f"{1 - agreement:.0%} of the tokens change"


class AnswerDivergence:
    """Divergence of a second answer from a first one, over the tokens up to the first difference.

    A logits processor, given to both calls of `generate`. To take little memory it keeps the `LIKELY`
    most likely tokens of each step, and counts the rest as one token. The divergence is hardly smaller
    for that.
    """

    def __init__(self) -> None:
        self.first: list[tuple[Tensor, Tensor]] = []
        self.kl: list[float] | None = None

    def begin(self) -> None:
        """Begin an answer: the first one, or the second one after it."""
        self.kl = [] if self.first else None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Look at the scores [1, vocabulary] of the next token, and return them as they are."""
        log_p = scores[0].float().log_softmax(-1)
        if self.kl is None:
            log, at = log_p.topk(min(LIKELY, len(log_p)))
            self.first.append((log, at))
        elif len(self.kl) < len(self.first):
            log, at = self.first[len(self.kl)]
            p, q = log.double().exp(), log_p[at].double().exp()
            p, q = (torch.cat([x, (1 - x.sum(0, keepdim=True))]).clamp_min(1e-12) for x in (p, q))
            self.kl.append(max(0.0, float((p * (p / q).log()).sum())))
        return scores

    def mean(self, equal_tokens: int) -> tuple[float, int]:
        """Return the mean divergence in nats, and the number of tokens it is of.

        equal_tokens: number of tokens at the start that both answers have. The next one had the same
        text before it, too.
        """
        counted = (self.kl or [])[: equal_tokens + 1]
        return sum(counted) / len(counted), len(counted)


def compare(full: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Compare logits [T, vocabulary] of two caches, position by position.

    Returns KL(full‖packed) in nats and 1 where the most likely tokens agree, else 0; both float64
    [T].
    """
    kl, agree = [], []
    for p, q in zip(full.split(POSITIONS_AT_A_TIME), packed.split(POSITIONS_AT_A_TIME), strict=True):
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64).clamp_min(0))
        agree.append((p.argmax(-1) == q.argmax(-1)).double())
    return torch.cat(kl), torch.cat(agree)


TASK = Divergence
