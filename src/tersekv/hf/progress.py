"""Detects a forward pass that was interrupted between two layers (KeyboardInterrupt, out of memory).

Layers take tokens in one after the other. A cache whose layers hold different numbers of tokens would give wrong
attention without an error, so the layers are compared once per forward pass, before the first one changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tersekv.errors import CacheError, UserError

if TYPE_CHECKING:
    from tersekv.hf.layer import CompressedLayer

NOWHERE = (-1, 0)
RESTART = "start again with cache.reset() or a new cache"


class Progress:
    """Which tokens the layers of one cache have seen. attention: by index, all layers that take every token in. linear:
    indices of layers with a recurrent state, which has no count of its own and cannot be cropped."""

    def __init__(self, attention: Mapping[int, CompressedLayer], linear: Collection[int]) -> None:
        self.attention, self.linear = attention, linear
        self.clear()

    def clear(self) -> None:
        """Forget what was interrupted, where all layers are empty."""
        self.torn = False  # inside a change of a layer, or for good once such a change was interrupted
        self.steps, self.last, self.done = 0, NOWHERE, {}

    steps: int
    """Forward passes begun, but for the first one where no hook has said so."""
    last: tuple[int, int]
    """The latest layer, and which of its states, that this pass has come to."""
    done: dict[int, int]
    """The latest forward pass that each layer took part in; kept where there are linear layers."""

    def start(self) -> None:
        """A forward pass begins.

        Raises:
            CacheError: the pass before this one was interrupted.
        """
        self.check()
        self.steps += 1
        self.last = NOWHERE

    def reach(self, layer: int, state: int) -> None:
        """A layer is about to read or change a state: 0 for what may happen more than once, else each has its number.
        A pass whose start nobody has told begins where layers do not follow one another.

        Raises:
            CacheError: the pass before this one was interrupted.
        """
        if (layer, state) < self.last or (state and (layer, state) == self.last):
            self.start()
        self.last = layer, state

    def end(self, layer: int) -> None:
        """A layer has taken tokens in."""
        if self.linear:
            self.done[layer] = self.steps

    def check(self) -> None:
        """Raise CacheError unless all layers have seen the same tokens."""
        if self.torn:
            raise CacheError(f"a change of this cache was interrupted halfway; {RESTART}")
        seen = self.seen()
        if len(set(seen.values())) > 1:
            raise CacheError(
                f"layers differ in the tokens they have seen ({_by_count(seen)}) because a forward pass was "
                f"interrupted; {self._remedy(seen)}"
            )
        in_cache = self.done.keys() & set(self.linear)  # RecurrentGemma keeps its state in its modules
        if len(set(self.done.values())) > 1 or (in_cache and len(in_cache) < len(self.linear)):
            raise CacheError(f"a forward pass was interrupted, and linear layers cannot go back; {RESTART}")

    def seen(self) -> dict[int, int]:
        """Tokens seen by layer."""
        return {index: layer.get_seq_length() for index, layer in self.attention.items()}

    def excess(self, tokens: int) -> dict[int, int]:
        """How many tokens each layer must take back so that all have seen `tokens` fewer than the foremost.

        Raises:
            CacheError: a layer has seen fewer already, or cannot take them back; nothing has changed.
        """
        seen = self.seen()
        ahead, behind = max(seen.values()), min(seen.values())
        if ahead != behind:
            if self.torn or self.linear:
                raise CacheError(f"this cache cannot be cropped after an interrupted forward pass; {RESTART}")
            if ahead - tokens > behind:
                raise CacheError(
                    f"crop({-tokens}) leaves {ahead - tokens} tokens, and a forward pass was interrupted "
                    f"({_by_count(seen)}); use crop({behind - ahead}) or less"
                )
        excess = {index: n - (ahead - tokens) for index, n in seen.items()}
        for index, n in excess.items():
            self.attention[index].check_crop(n)
        return excess

    def _remedy(self, seen: dict[int, int]) -> str:
        ahead, behind = max(seen.values()), min(seen.values())
        try:
            self.excess(ahead - behind)
        except CacheError:
            return RESTART
        if behind == 0:
            return "call cache.reset() and run the prompt again"
        return f"take the pass back with cache.crop({behind - ahead}) and run it again"

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change that leaves layers or sides different while it lasts. An error of ours comes before any
        change."""
        self.torn = True
        try:
            yield
        except (CacheError, UserError):
            self.torn = False
            raise
        self.torn = False


def _by_count(seen: dict[int, int]) -> str:
    """ "31 in layers 0-4, 30 in layers 5-29"."""
    runs = []
    for tokens, layers in itertools.groupby(seen, key=lambda index: seen[index]):
        first, *rest = layers
        runs.append(f"{tokens:,} in layer{f's {first}-{rest[-1]}' if rest else f' {first}'}")
    return ", ".join(runs)
