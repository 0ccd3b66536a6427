"""Keep every token: sinks and the latest tokens exact, everything between them packed (StreamingLLM's sinks, arXiv
2309.17453; KIVI's residual, arXiv 2402.02750)."""

from __future__ import annotations

from dataclasses import dataclass

from tersekv.tokens.base import TokenPolicy


@dataclass(frozen=True)
class Window(TokenPolicy):
    """Packs whole blocks as soon as at least `recent` tokens stay exact behind them."""


POLICY = Window
