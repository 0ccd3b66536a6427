"""HeadKV (arXiv 2410.19258): SnapKV with a budget of its own for each KV head.

Heads that retrieve keep more tokens. A head's importance is measured once per model by `tersekv
calibrate` (`calibration/head_scores.py`). Within a head, tokens are chosen as in SnapKV.

Let b be the mean number of tokens per head beyond those that always stay. Each head gets
b·(1 − 1/β). The b/β of all N heads are pooled and distributed by importance S, with ΣS = 1 (§3.3).
So a head has b·(1 − 1/β) + S·N·b/β. The paper reports the best of eight β from 1.005 to 10.

Different here:

- Budgets are per KV head. The importance of a KV head is the mean over its query heads. The
  authors' code repeats keys and values, so that each query head keeps tokens of its own.
- A head whose share exceeds the prompt gives the rest to the others, in proportion to their
  importance. So the heads' budgets add up to N times the mean. The authors' code loses the rest.
- Layers with a sliding window take no part.
- Sinks count within the budget; the paper has none (`sinks=0`).

Good for: the same as snapkv, where few heads retrieve.
Bad for: questions that come after the text; and a first use, because heads are measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class HeadKV(SnapKV):
    """Options of HeadKV. The defaults of window, kernel and pool are the authors'.

    beta: β. The share of the budget that is distributed by importance is 1/β.
    """

    needs_scores: ClassVar[bool] = True

    recent: int = 8
    window: int = 8
    pool: Literal["avg", "max"] = "max"
    beta: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.beta < float("inf"):
            raise UserError(f"beta={self.beta:g} is not allowed; give 1 (all by importance) or more")

    @property
    def profile(self) -> str:
        """Importance of the model's heads."""
        return "headkv"

    def of_heads(self, kept: int, tokens: int, scores: Tensor) -> Tensor:
        """Return the budget of each head, int64 [layers, heads], with the mean `kept`."""
        always = kept - self.room(kept) + self.latest(kept)
        return head_budgets(scores, kept, always, tokens, self.beta)


POLICY = HeadKV


def head_budgets(scores: Tensor, mean: int, always: int, most: int, beta: float) -> Tensor:
    """Distribute `mean` tokens per head over the heads of a model, int64 [layers, heads].

    scores: importance of each head [layers, heads], negative for heads that take no part. These get
        the mean.
    always: tokens that every head keeps. most: maximum for a head.
    """
    budgets = torch.full(scores.shape, mean, dtype=torch.int64)
    part = scores >= 0
    heads = int(part.sum())
    if mean >= most or heads == 0:
        return budgets
    weights = scores[part].double().cpu()
    pool = heads * (mean - always) / beta
    shares = torch.full_like(weights, always + (mean - always) * (1 - 1 / beta))
    open_ = torch.ones_like(part[part]).cpu()
    while pool > 1e-9:  # a pass closes at least one head, or is the last
        own = weights * open_
        own = own if own.sum() > 0 else open_.double()
        shares = shares + own * (pool / own.sum())
        pool = float((shares - most).clamp(min=0).sum())
        shares = shares.clamp(max=most)
        open_ = shares < most
    whole = (shares + 1e-9).floor()
    left = heads * mean - int(whole.sum())
    order = (shares - whole).argsort(descending=True, stable=True)
    whole[order[:left]] += 1
    budgets[part.cpu()] = whole.long()
    return budgets
