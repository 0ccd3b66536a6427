"""Keep every token: attention sinks and the latest tokens exact, all others packed.

Sinks are from StreamingLLM (arXiv 2309.17453), the residual window is from KIVI (arXiv 2402.02750).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tersekv.errors import UserError
from tersekv.policies.base import TokenPolicy

AUTO = "auto"


@dataclass(frozen=True)
class Window(TokenPolicy):
    """Pack whole blocks as soon as at least `recent` later tokens stay exact.

    start: number of tokens before any is packed. Then all tokens but the sinks and the `recent`
        latest are packed at once. "auto" is twice `recent`, because packing fewer saves nothing,
        and codecs fitted on the prompt get more data (`docs/log.md`). A layer whose sliding window
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
