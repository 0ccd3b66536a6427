"""StreamingLLM (arXiv 2309.17453): the first tokens, which attract attention whatever they say (§3.1), and the latest
ones; all between them is dropped (§3.2, Figure 4).

Ours keeps tokens at the positions they were read at, as long as the model's own positions reach; the paper counts
positions within the cache. The paper's cache is `streaming:budget=2048+exact`; with a codec, the latest tokens but
`recent` of them are packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tersekv.policies.base import Evicts, Selection


@dataclass(frozen=True)
class Streaming(Selection):
    """Sinks and the latest tokens, `budget` in all."""

    evicts: ClassVar[Evicts] = "step"

    def latest(self, kept: int) -> int:
        """All but the sinks."""
        return self.room(kept)


POLICY = Streaming
