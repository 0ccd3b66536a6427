"""Numbers of tokens of one layer: attention sinks | packed tokens | recent window.

A placement has no keys or values. A store asks it what a call changes.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from tersekv.cache.pages import ROLLBACK_TOKENS, evicted_by
from tersekv.cache.schema import flag, one_of, require, whole
from tersekv.cache.state import Rules, Spec, Stateful
from tersekv.errors import CacheError
from tersekv.policies.base import PROMPT_TOKENS, TokenPolicy, is_prompt


class Move(NamedTuple):
    """Changes by one call, in numbers of tokens.

    sinks: first new tokens, which become sinks.
    leave: oldest tokens of window and new ones together that leave the window, whole blocks.
    skip: oldest of these that no query can see, which are not packed.
    forget: oldest packed tokens that no query can see.
    """

    sinks: int
    leave: int
    skip: int
    forget: int

    @property
    def packed(self) -> int:
        """Number of tokens that are packed."""
        return self.leave - self.skip


def placed_tokens(placement: Placement, place: str) -> None:
    """Check that the numbers of a placement fit each other."""
    p = placement
    require(p.tail >= 0, place, f"holds more tokens than the {p.tokens} received")
    for name in ("packed", "evicted"):
        require(getattr(p, name) % p.block == 0, f"{place}.{name}", f"is not a multiple of {p.block}")
    left = 0 if p.window is None else max(0, p.tokens - p.window + 1)
    require(p.evicted <= left, f"{place}.evicted", f"is {p.evicted}, and must be at most {left}")
    wanted = 0 if p.deferred else min(p.most_sinks, p.tokens)
    require(p.sinks == wanted, f"{place}.sinks", f"is {p.sinks}, and must be {wanted}")
    require(not p.deferred or p.tail == p.tokens, place, "is deferred, and must not have sinks or packed tokens")


class Placement(Stateful):
    """Numbers of tokens of a layer under a policy that treats all heads alike.

    window: the layer's sliding window in tokens, None for full attention.
    block: number of tokens that are packed together.
    tokens: received. sinks, packed, evicted: of these; the others are in the recent window.
    deferred: True while nothing is in sinks or packed: no tokens yet, or rows that are still short.
    continues: True if the next call may be the rest of a prompt, see `is_prompt`.
    record_past: True if a sliding window evicts at a crop only.
    """

    STATE: ClassVar[Spec] = {
        **dict.fromkeys(("tokens", "sinks", "packed"), lambda placement: whole()),
        "evicted": lambda placement: one_of(0) if placement.window is None else whole(),
        **dict.fromkeys(("deferred", "continues", "record_past"), lambda placement: flag),
    }
    RULES: ClassVar[Rules] = (placed_tokens,)

    def __init__(self, policy: TokenPolicy, window: int | None, block: int) -> None:
        self.policy, self.window, self.block = policy, window, block
        self.most_sinks = policy.sink_tokens(window)
        self.record_past = False
        self.restart()

    def restart(self) -> None:
        """Start over, without tokens."""
        self.tokens = self.sinks = self.packed = self.evicted = 0
        self.deferred, self.continues = True, False

    def fresh(self) -> Placement:
        """Return a placement without tokens."""
        made = Placement(self.policy, self.window, self.block)
        made.record_past = self.record_past
        return made

    @property
    def tail(self) -> int:
        """Number of tokens in the recent window."""
        return self.tokens - self.sinks - self.packed - self.evicted

    @property
    def packed_first(self) -> int:
        """Position of the first packed token."""
        return self.sinks + self.evicted

    def move(self, n: int) -> Move:
        """Return what a call of n tokens changes."""
        sinks = min(self.most_sinks - self.sinks, n)
        return Move(sinks, *self._leaving(self.tail + n - sinks, n, self.tokens + n))

    def _leaving(self, waiting: int, n: int, seen: int) -> tuple[int, int, int]:
        """Return `leave`, `skip` and `forget` of a call of n tokens, after which `seen` are received.

        waiting: tokens of window and call. Of generated tokens that are not packed, those out of the
        sliding window leave.
        """
        packs = self.policy.packs_generated or is_prompt(n, self.deferred, self.continues)
        leave = (
            self.policy.to_pack(waiting, self.block, seen, self.window) if packs else waiting // self.block * self.block
        )
        if self.record_past or (not leave and packs):
            return leave if packs else 0, 0, 0
        forget, skip = evicted_by(self.window, seen, self.evicted, self.packed, leave, self.block)
        return leave if packs else skip, skip, forget

    def add(self, n: int, move: Move) -> None:
        """Receive n tokens, see `move`."""
        self.tokens += n
        self.sinks += move.sinks
        self.packed += move.packed - move.forget
        self.evicted += move.skip + move.forget
        self.deferred, self.continues = False, n >= PROMPT_TOKENS and not self.policy.packs_generated

    def room(self) -> int:
        """Return the number of generated tokens that can be added before some leave the window.

        It is 0 while sinks are missing, and if the next call may continue a prompt.
        """
        packs = self.policy.packs_generated
        if self.deferred or self.sinks < self.most_sinks or self.continues:
            return 0
        most, tail, n = self.block if packs else PROMPT_TOKENS - 1, self.tail, 0
        while n < most and not any(self._leaving(tail + n + 1, 1, self.tokens + n + 1)):
            n += 1
        return n

    def check_crop(self, n: int, first: int | None = None) -> None:
        """Raise CacheError unless the n latest tokens can be rolled back.

        first: position of the first token of the row with the most padding, None without padding.
        """
        left = self.tokens - n
        if left < 0:
            raise CacheError(f"cannot roll back {n} tokens, only {self.tokens} were seen")
        if first is not None and 0 < left < first + self.sinks:
            raise CacheError(
                f"cannot roll back {n} of {self.tokens} tokens, rows of a left-padded batch would lose their first "
                "ones; reset the cache instead"
            )
        if self.window is not None and self.evicted > max(0, left - self.window + 1):
            raise CacheError(
                f"cannot roll back {n} tokens of a layer with sliding window {self.window}; "
                f"{ROLLBACK_TOKENS} are kept for that"
            )

    def crop(self, n: int) -> tuple[int, int]:
        """Roll back the n latest tokens. Affected blocks are removed as a whole.

        Return how many packed tokens are removed, and how many of these return to the window.
        """
        from_packed = min(max(0, n - self.tail), self.packed)
        removed = -(-from_packed // self.block) * self.block
        self.tokens -= n
        self.packed -= removed
        self.sinks = min(self.sinks, self.tokens)
        self.continues = False
        if self.tokens == 0:
            self.restart()
        return removed, removed - from_packed

    def past(self) -> int:
        """Forget what a crop with `record_past` shows to be out of the window, and return its number."""
        forget = evicted_by(self.window, self.tokens, self.evicted, self.packed, 0, self.block)[0]
        self.packed -= forget
        self.evicted += forget
        return forget
