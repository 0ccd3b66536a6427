"""Keep every token: attention sinks and the latest tokens exact, all others packed.

Sinks are from StreamingLLM (arXiv 2309.17453), the residual window is from KIVI (arXiv 2402.02750).

`generated=exact` keeps generated tokens exact, as PolarQuant does (arXiv 2502.02617, §5.3). Prompts
are packed as by default. Three kinds of calls belong to a prompt:

- the first call;
- a call of 32 tokens or more;
- directly after such a call, one of 2 to 31 tokens: the rest of a prompt fed in chunks.

All other calls are generated tokens, or proposals of assisted decoding, and pack nothing. The next
prompt packs all earlier tokens but the `recent` latest, as if the whole conversation were fed again.
A sliding-window layer evicts generated tokens that no query can see any more.

Good for: every use: no token is lost. It is the default.
Bad for: caches that must not grow with the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tersekv.errors import UserError
from tersekv.policies.base import TokenPolicy

AUTO = "auto"
MOST_FOUND = 1024


@dataclass(frozen=True)
class Keeping(TokenPolicy):
    """A policy that keeps every token.

    generated: "packed", or "exact" to pack prompts only.
    found: number of packed tokens per layer that stay exact, those of the most unusual norms
        (`cache/found_sinks.py`). Sliding-window layers have none.
    """

    generated: Literal["packed", "exact"] = "packed"
    found: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generated not in ("packed", "exact"):
            raise UserError(f"generated={self.generated} is not allowed; choose one of packed, exact")
        if not 0 <= self.found <= MOST_FOUND:
            raise UserError(f"found={self.found} is out of range; allowed are 0 to {MOST_FOUND} tokens")

    @property
    def most_found(self) -> int:
        """The option `found`."""
        return self.found

    @property
    def packs_generated(self) -> bool:
        """True unless generated tokens stay exact."""
        return self.generated == "packed"


@dataclass(frozen=True)
class Window(Keeping):
    """Pack whole blocks as soon as at least `recent` later tokens stay exact.

    start: number of tokens before any is packed. Then all tokens but the sinks and the `recent`
        latest are packed at once. "auto" is twice `recent`, because packing fewer saves nothing,
        and codecs fitted on the prompt get more data (`docs/measured/dropped.md`). A layer whose sliding window
        is smaller packs as with 0.
    """

    start: str = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != AUTO and not re.fullmatch(r"\d{1,12}", self.start):
            raise UserError(f"start={self.start} is not a number of tokens; give 0 or more, or auto for twice `recent`")

    def first_packing(self, window: int | None) -> int:
        """Return `start`, or 0 in a layer whose sliding window is smaller."""
        start = 2 * self.recent if self.start == AUTO else int(self.start)
        return start if window is None or start <= window else 0


POLICY = Window
