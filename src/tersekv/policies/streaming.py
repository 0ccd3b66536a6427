"""StreamingLLM (arXiv 2309.17453): keep the attention sinks and the latest tokens, evict the rest.

Sinks are the first tokens, which receive attention whatever their content (§3.1; §3.2, Figure 4).

Here tokens keep their original positions, so contexts cannot exceed the model's position range. The
paper counts positions within the cache. The recipe of the paper's cache is
`streaming:budget=2048+exact`. With a codec, the kept tokens are packed, except the sinks and the
`recent` latest ones.

Good for: endless text of which only the latest part matters.
Bad for: facts in the middle of a text: they are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tersekv.policies.base import Stepwise


@dataclass(frozen=True)
class Streaming(Stepwise):
    """Keep attention sinks and the latest tokens, `budget` in all."""

    def latest(self, kept: int) -> int:
        """Return all of the budget except the sinks."""
        return self.room(kept)


POLICY = Streaming
