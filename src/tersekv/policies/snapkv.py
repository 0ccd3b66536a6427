"""SnapKV (arXiv 2404.14469): keep the tokens that the latest queries of a prompt attend to.

Queries vote by attention weight. Votes are pooled over neighbouring tokens, so the context of a
chosen token stays too (§4.2, Listing 1).

Votes are softmax weights over all tokens, summed over the queries of the observation window. The
window's own tokens are not voted on, because they always stay. There is one choice per KV head, by
the mean over its query heads (the paper's models have one each). Generated tokens are kept. A later
prompt triggers a new choice among its tokens and those kept before.

Good for: long prompts that end with their question.
Bad for: questions that come after the text; and long answers, because all their tokens stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.policies.base import MOST_TOKENS, Candidates, Selection


@dataclass(frozen=True)
class SnapKV(Selection):
    """Options of SnapKV.

    window: number of latest queries that vote.
    kernel: number of tokens per pool, odd.
    pool: "avg" or "max".
    """

    observes: ClassVar[bool] = True

    recent: int = 32
    window: int = 32
    kernel: int = 7
    pool: Literal["avg", "max"] = "avg"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window <= MOST_TOKENS:
            raise UserError(f"window={self.window} is not allowed; give 1 to {MOST_TOKENS} queries")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"kernel={self.kernel} is not allowed; give an odd number of tokens")
        if self.pool not in ("avg", "max"):
            raise UserError(f"pool={self.pool} is not allowed; choose one of avg, max")

    def latest(self, kept: int) -> int:
        """Return the larger of the observation window and `recent`, within the budget."""
        return min(self.room(kept), max(self.window, self.recent))

    def observed(self, queries: int) -> int:
        """Return the size of the observation window, at most `queries`."""
        return min(self.window, queries)

    def ranks(self, tokens: Candidates) -> Tensor:
        """Return the votes pooled over neighbours in order of position.

        Tokens evicted after an earlier prompt leave no gap in this order.
        """
        outside = (tokens.positions < 0) | (tokens.positions >= tokens.num_tokens - self.window)
        order = tokens.positions.argsort(dim=-1, stable=True)
        votes = tokens.votes.masked_fill(outside, 0.0).gather(-1, order)
        pool = torch.nn.functional.avg_pool1d if self.pool == "avg" else torch.nn.functional.max_pool1d
        pooled = pool(votes, self.kernel, stride=1, padding=self.kernel // 2)
        return torch.empty_like(pooled).scatter_(-1, order, pooled)


POLICY = SnapKV
