"""Keep every token: sinks and the latest tokens exact, everything between them packed (StreamingLLM's sinks, arXiv
2309.17453; KIVI's residual, arXiv 2402.02750)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tersekv.errors import UserError
from tersekv.policies.base import TokenPolicy

AUTO = "auto"


@dataclass(frozen=True)
class Window(TokenPolicy):
    """Packs whole blocks as soon as at least `recent` tokens stay exact behind them.

    start: tokens that are held exact before any is packed; then all but the sinks and the recent ones are packed at
    once. "auto" is twice `recent`: packing fewer gains nothing, and codecs that are fitted on the prompt are fitted on
    more (`docs/log.md`). A layer whose sliding window is smaller packs as with 0.
    """

    start: str = AUTO

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != AUTO and not re.fullmatch(r"\d{1,12}", self.start):
            raise UserError(f"start={self.start} is no number of tokens; give 0 or more, or auto for twice `recent`")

    def first_packing(self, window: int | None) -> int:
        """`start`, or none in a layer that drops tokens before."""
        start = 2 * self.recent if self.start == AUTO else int(self.start)
        return start if window is None or start <= window else 0


POLICY = Window
