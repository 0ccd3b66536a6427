"""Keep every token: the most important ones at the codec's rate, the others at a lower one (ours).

A prompt's tokens are ranked for each KV head by the attention that they receive in a second reading
of the prompt (`attention/importance.py`). A fixed share of them is packed with the codec's bits, and
the rest with fewer bits from the same fit. Generated tokens are few and recent, and no query has
shown their importance yet, so all of them have the codec's bits.

A call of 32 tokens or more is a prompt, and so is the first call. Tokens of a later prompt are
ranked among those that it packs. If they fill fewer than 4 blocks, all have the codec's bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tersekv.errors import UserError
from tersekv.policies.base import Rated, TokenPolicy, check_lower_rate

FEW = 4
"""Blocks that a prompt must pack at once to have two rates. Fewer tokens are recent ones, and few
queries have seen them."""


@dataclass(frozen=True)
class Mixed(TokenPolicy):
    """Options of mixed rates.

    budget: share of each KV head's prompt tokens that have the codec's bits, rounded up to whole
        blocks.
    rest: bits of the other tokens.
    """

    observes: ClassVar[bool] = True

    budget: float = 0.25
    rest: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.budget < 1:
            raise UserError(
                f"budget={self.budget:g} is not allowed; give a share of the prompt's tokens between 0 and 1"
            )
        if self.rest <= 0:
            raise UserError(f"rest={self.rest:g} is not allowed; give the bits of the less important tokens, above 0")
        if self.corrected_share:
            raise UserError(
                f"bias_correction={self.bias_correction} is not available with several rates; use "
                "bias_correction=off, or the policy window"
            )

    def first_packing(self, window: int | None) -> int:
        """Return twice `recent`, or 0 in a layer whose sliding window is smaller, as for `window`."""
        return 2 * self.recent if window is None or 2 * self.recent <= window else 0

    def check(self, keys: Rated, values: Rated) -> None:
        """Raise UserError unless both codecs have the lower rate. Exact layers need none."""
        check_lower_rate(self.rest, keys, values)

    def chosen(self, tokens: int, unit: int) -> int:
        """Return how many of a prompt's packed tokens have the codec's bits, a multiple of `unit`.

        If there are fewer than FEW blocks, all have them.
        """
        return tokens if tokens < FEW * unit else min(tokens, math.ceil(self.budget * tokens / unit - 1e-6) * unit)


POLICY = Mixed
