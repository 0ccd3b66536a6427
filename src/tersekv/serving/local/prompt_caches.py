"""Packed caches of earlier prompts, found by the tokens that a new prompt begins with."""

from __future__ import annotations

import copy
from collections.abc import Callable

from torch import Tensor

from tersekv.hf.cache import CompressedCache
from tersekv.hf.layer import compressed_layers
from tersekv.hf.token_ids import without_padding

FEWEST = 16
"""Tokens in common from which an earlier cache is used."""

SHARE = 0.5
"""Share of a cache's first prompt that a new prompt must begin with, because codecs and policies are
fitted on that prompt."""


class PromptCaches:
    """Caches by their latest use, limited in their packed bytes.

    new: makes an empty cache. most_bytes: of all caches that are kept.
    """

    def __init__(self, new: Callable[[], CompressedCache], most_bytes: int) -> None:
        self._new, self._most = new, most_bytes
        self._held: list[tuple[CompressedCache, int]] = []  # with its bytes, because counting them takes long

    def __len__(self) -> int:
        return len(self._held)

    def take(self, ids: Tensor) -> CompressedCache:
        """Return a cache for the prompt ids [1, T], to be given back by `keep`.

        It is the one with most tokens in common. If the prompt goes on after all of them, it is taken
        out, else copied, because another prompt may go on with it.
        """
        prompt = without_padding(ids)
        common = [cache.token_ids.common(prompt) for cache, _ in self._held]
        best = max(range(len(common)), key=lambda i: common[i], default=None)
        if best is None or common[best] < max(FEWEST, SHARE * _first_prompt(self._held[best][0])):
            return self._new()
        if common[best] == self._held[best][0].get_seq_length():
            return self._held.pop(best)[0]
        return copy.deepcopy(self._held[best][0])

    def keep(self, cache: CompressedCache) -> None:
        """Keep a cache as the latest one; remove the oldest ones beyond the limit."""
        if cache.get_seq_length():
            self._held.append((cache, cache.footprint().total_bytes))
        while self._held and self.bytes() > self._most:
            del self._held[0]

    def bytes(self) -> int:
        """Return the packed bytes of all caches."""
        return sum(size for _, size in self._held)


def _first_prompt(cache: CompressedCache) -> int:
    """Return the number of tokens of the first call, on which codecs are fitted."""
    return max((layer.first_tokens for layer in compressed_layers(cache)), default=0)
