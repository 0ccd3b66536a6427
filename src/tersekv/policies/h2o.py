"""H2O (arXiv 2306.14048): keep the latest tokens and those that received most attention.

The latter are the "heavy hitters". Each group gets half of the budget. One token is evicted at
every step (Algorithm 1). With `evict=block` the attention of 32 queries is added up at once, and 32
tokens are evicted together.

A token's score is the sum of the attention weights from all queries so far. It is averaged over the
query heads of its KV head; the paper's models have one query head per KV head. Sinks are not part
of the paper: `sinks=0` removes them. `score=mean` divides by the number of queries that could see
the token, because early tokens are seen by more queries. With `heavy=1` this is observed attention
in kvpress.

Good for: streams of text whose cache must not grow.
Bad for: questions that come after the text: what they ask for may be gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from tersekv.errors import UserError
from tersekv.policies.base import Candidates, Stepwise


@dataclass(frozen=True)
class H2O(Stepwise):
    """Options of H2O.

    heavy: share of the budget for heavy hitters and sinks. The rest is for the latest tokens.
    score: "sum" or "mean" of the attention weights over queries.
    """

    observes: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    heavy: float = 0.5
    score: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.heavy <= 1:
            raise UserError(f"heavy={self.heavy:g} is not allowed; give a share of the budget from 0 to 1")
        if self.score not in ("sum", "mean"):
            raise UserError(f"score={self.score} is not allowed; choose one of sum, mean")

    def latest(self, kept: int) -> int:
        """Return the part of the budget that is not for heavy hitters."""
        return min(self.room(kept), kept - int(self.heavy * kept))

    def observed(self, queries: int) -> int:
        """Return `queries`: all of them are observed."""
        return queries

    def ranks(self, tokens: Candidates) -> Tensor:
        """Return the attention received so far, or its mean per query."""
        if self.score == "sum":
            return tokens.votes
        return tokens.votes / (tokens.num_tokens - tokens.positions).clamp(min=1)


POLICY = H2O
