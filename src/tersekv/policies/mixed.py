"""Keep every token: the most important ones at the codec's rate, the others at a lower one (ours).

Tokens are ranked for each KV head by the attention that they receive in a second reading of the text
(`attention/importance.py`). A fixed share of them is packed with the codec's bits, and the rest with
fewer bits from the same fit. With `allot=prompt` or `allot=model`, rates and shares differ between heads.

Tokens are ranked when they are packed: those of a prompt together, and generated tokens in chunks of
4 blocks. A chunk is ranked among itself by queries that were kept since, one of every 8 tokens.

Good for: the least memory that keeps every token: the preset `small`.
Bad for: time: reading a prompt takes longer, and allot=model measures the model first.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from tersekv.errors import UserError
from tersekv.policies.base import Rated, check_lower_rate
from tersekv.policies.window import Keeping

CHUNK = 4
"""Blocks that are packed together at least. Fewer tokens could hardly be ranked."""

EVERY, KEPT = 8, 16
"""A query of every `EVERY` tokens is kept, and the latest `KEPT` of them."""

RECOMMENDED = "mixed:allot=prompt,bias_correction=full+trellis:bits=1.7,calibration=prompt"
"""The preset `small`."""


@dataclass(frozen=True)
class Mixed(Keeping):
    """Options of mixed rates.

    budget: share of each KV head's tokens that have the codec's bits, rounded up to whole blocks of
        those that are packed together.
    rest: bits of the other tokens.
    reread: read prompts twice and rank their tokens by the second reading.
    allot: layer uses these rates in every layer. prompt and model choose share and rates of each KV head,
        with the codec's bits as the mean over heads and tokens (`sizes/rate_allotment.py`): by the
        prompt's own queries, or by a measurement of the model.
    """

    observes: ClassVar[bool] = True
    recommended: ClassVar[str] = "small"

    budget: float = 0.25
    rest: float = 2.0
    reread: bool = False
    allot: Literal["layer", "prompt", "model"] = "layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allot not in ("layer", "prompt", "model"):
            raise UserError(f"allot={self.allot} is not allowed; choose one of layer, prompt, model")
        if self.allots and (self.budget, self.rest) != (Mixed.budget, Mixed.rest):
            raise UserError(
                f"allot={self.allot} chooses budget and rest of each layer; leave these options out, and give the mean "
                "bits as the codec's bits"
            )
        if not 0 < self.budget < 1:
            raise UserError(f"budget={self.budget:g} is not allowed; give a share of the tokens between 0 and 1")
        if self.rest <= 0:
            raise UserError(f"rest={self.rest:g} is not allowed; give the bits of the less important tokens, above 0")

    @property
    def reads_twice(self) -> bool:
        """True if the policy ranks a prompt's tokens by a second reading of it."""
        return self.reread

    @property
    def allots(self) -> bool:
        """True before a layer has got its rates, with allot=prompt or allot=model."""
        return self.allot != "layer"

    @property
    def waits(self) -> bool:
        """True before a layer has got its rates, with allot=prompt."""
        return self.allot == "prompt"

    @property
    def profile(self) -> str | None:
        """Spread of the model's attention, for allot=model. Ranking by a second reading has its own."""
        if self.allot != "model":
            return None
        return "mixed-reread" if self.reread else "mixed"

    def with_shares(self, budget: float, rest: float) -> Mixed:
        """Return the policy of one layer with the rates that it has got."""
        return dataclasses.replace(self, allot="layer", budget=budget, rest=rest)

    def first_packing(self, window: int | None) -> int:
        """Return twice `recent`, or 0 in a layer whose sliding window is smaller, as for `window`."""
        return 2 * self.recent if window is None or 2 * self.recent <= window else 0

    def check(self, keys: Rated, values: Rated) -> None:
        """Raise UserError unless both codecs have the lower rate. Exact layers need none."""
        check_lower_rate(None if self.allots else self.rest, keys, values, f"allot={self.allot}")

    def waiting_tokens(self, block: int, window: int | None) -> int:
        """Return `CHUNK` blocks. Layers with a sliding window have one rate and pack single blocks."""
        return CHUNK * block if window is None else block

    def chosen(self, share: float, tokens: int, unit: int) -> int:
        """Return how many of a head's tokens that are packed have its higher rate, a multiple of `unit`.

        It is at least one block, also of a few generated tokens: later tokens read these most.

        All have it before the layer has got its rates.
        """
        if self.allots:
            return tokens
        return min(tokens, math.ceil(share * tokens / unit - 1e-6) * unit)

    @staticmethod
    def kept_queries(seen: int, n: int) -> list[int]:
        """Return which of n new queries, after `seen` tokens, are kept. Of all, the latest `KEPT` stay."""
        return [i for i in range(max(0, n - EVERY * KEPT), n) if (seen + i) % EVERY == 0]


POLICY = Mixed
