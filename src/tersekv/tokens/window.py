"""Keep every token: sinks and the latest tokens exact, everything between them packed (StreamingLLM's sinks, arXiv
2309.17453; KIVI's residual, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass

from tersekv.errors import UserError
from tersekv.tokens.base import TokenPolicy


@dataclass(frozen=True)
class Window(TokenPolicy):
    """Packs whole blocks as soon as at least `recent` tokens stay exact behind them.

    start: tokens that are held exact before any is packed; then all but the sinks and the recent ones are packed at
    once. A layer whose sliding window is smaller packs as without it.
    """

    start: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start < 0:
            raise UserError(f"start={self.start} is negative; give 0 or more tokens")

    def first_packing(self, window: int | None) -> int:
        """`start`, or none in a layer that drops tokens before."""
        return self.start if window is None or self.start <= window else 0


POLICY = Window
