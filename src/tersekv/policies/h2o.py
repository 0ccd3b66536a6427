"""H2O (arXiv 2306.14048): tokens that have received most attention so far ("heavy hitters") and the latest ones, half
the budget each; one token leaves at every step (Algorithm 1).

The score of a token is the sum of the attention weights that all queries so far gave it, averaged over the query heads
of its KV head (the paper's models have one each). Sinks are no part of the paper: `sinks=0` leaves them out.
`score=mean` divides by the queries that could see the token, which takes away the early tokens' advantage; with
`heavy=1` it is what kvpress calls observed attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from tersekv.errors import UserError
from tersekv.policies.base import Candidates, Evicts, Selection


@dataclass(frozen=True)
class H2O(Selection):
    """heavy: share of the budget for heavy hitters (and sinks); the rest are the latest tokens. score: sum or mean."""

    observes: ClassVar[bool] = True
    evicts: ClassVar[Evicts] = "step"
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
        """The share that is not for heavy hitters."""
        return min(self.room(kept), kept - int(self.heavy * kept))

    def observed(self, queries: int) -> int:
        """All."""
        return queries

    def ranks(self, tokens: Candidates) -> Tensor:
        """Attention so far."""
        if self.score == "sum":
            return tokens.votes
        return tokens.votes / (tokens.num_tokens - tokens.positions).clamp(min=1)


POLICY = H2O
