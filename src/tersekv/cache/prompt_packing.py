"""The cache of one layer that packs prompts only; generated tokens stay exact in the tail."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tersekv.cache.layer import LayerStore
from tersekv.cache.layer_checks import LAYER
from tersekv.cache.parallel import HeadShard
from tersekv.cache.schema import flag
from tersekv.codecs.transforms.moments import TokenLoss
from tersekv.codecs.transforms.rope import Rope
from tersekv.policies.base import PROMPT_TOKENS, is_prompt
from tersekv.recipe import LayerPlan
from tersekv.tensors import plain


class PromptPackingStore(LayerStore):
    """Layer under a policy that does not pack generated tokens.

    continues: True if the next call may be the rest of a prompt, see `is_prompt`.
    """

    STATE = LAYER | {"continues": lambda store: flag}

    def __init__(
        self,
        plan: LayerPlan,
        keys: Tensor,
        values: Tensor,
        window: int | None = None,
        rope: Rope | None = None,
        heads: HeadShard | None = None,
    ) -> None:
        super().__init__(plan, keys, values, window, rope, heads)
        self.continues = False
        for side in self.sides:
            side.tail.grows = True

    def _add(self, new: list[Tensor], restart: bool, losses: Sequence[TokenLoss | None] | None) -> None:
        n = new[0].shape[2]
        super()._add(new, restart, losses)
        self.continues = n >= PROMPT_TOKENS
        self.room = self._room()

    def _due(self, waiting: int, n: int, seen: int) -> tuple[int, int, int]:
        """Return the same as `LayerStore._due`; of generated tokens only those out of the window."""
        if is_prompt(n, self.deferred, self.continues):
            return super()._due(waiting, n, seen)
        if self.window is None or self.record_past:
            return 0, 0, 0
        forget, skip = self._unseen(seen, waiting // self.flush_tokens * self.flush_tokens)
        return skip, forget, skip

    def _room(self) -> int:
        """Return the number of generated tokens that can be added before some are evicted.

        It is 0 while sinks are missing, and after a prompt, which the next call may continue.
        """
        if self.continues or self.keys.sinks.shape[2] < self.policy.sink_tokens(self.window):
            return 0
        held, n = self.keys.tail.tokens, 0
        while n < PROMPT_TOKENS - 1 and not any(self._due(held + n + 1, 1, self.num_tokens + n + 1)):
            n += 1
        return n

    @plain
    def crop(self, n: int) -> None:
        """Roll back the n latest tokens, see `LayerStore.crop`. Then no prompt continues."""
        super().crop(n)
        self.continues = False
