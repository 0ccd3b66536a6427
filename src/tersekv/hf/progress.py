"""Detects a forward pass that was interrupted between two layers (KeyboardInterrupt, out of memory).

Layers take tokens in one after the other. A cache whose layers hold different numbers of tokens would give wrong
attention without an error, so the layers are compared once per forward pass, before the first one changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import LongTensor, Tensor
from transformers.cache_utils import Cache

from tersekv.errors import CacheError, UserError
from tersekv.hf.traced import is_traced

NOWHERE = (-1, 0)
RESTART = "start again with cache.reset() or a new cache"


def checked_crop(tokens_to_remove: int) -> int:
    """The argument of `crop` as a whole number, which is 0 or less."""
    tokens_to_remove = int(tokens_to_remove)  # releases before 5.17 pass a tensor
    if tokens_to_remove > 0:
        raise UserError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; pass 0 or less")
    return tokens_to_remove


class CountingLayer(Protocol):
    """A layer that knows how many tokens it has seen, and whether it can take some back."""

    def get_seq_length(self) -> int:
        """Tokens seen."""

    def check_crop(self, tokens: int) -> None:
        """Raise CacheError unless that many of the latest tokens can be taken back."""


class Progress:
    """Which tokens the layers of one cache have seen. attention: by index, all layers that take every token in. linear:
    indices of layers with a recurrent state, which has no count of its own and cannot be cropped."""

    def __init__(self, attention: Mapping[int, CountingLayer], linear: Collection[int]) -> None:
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
        seen = self.num_tokens()
        if len(set(seen.values())) > 1:
            raise CacheError(
                f"layers differ in the tokens they have seen ({_by_count(seen)}) because a forward pass was "
                f"interrupted; {self._remedy(seen)}"
            )
        in_cache = self.done.keys() & set(self.linear)  # RecurrentGemma keeps its state in its modules
        if len(set(self.done.values())) > 1 or (in_cache and len(in_cache) < len(self.linear)):
            raise CacheError(f"a forward pass was interrupted, and linear layers cannot go back; {RESTART}")

    def num_tokens(self) -> dict[int, int]:
        """Tokens seen by layer."""
        return {index: layer.get_seq_length() for index, layer in self.attention.items()}

    def excess(self, tokens: int) -> dict[int, int]:
        """How many tokens each layer must take back so that all have seen `tokens` fewer than the foremost.

        Raises:
            CacheError: a layer has seen fewer already, or cannot take them back; nothing has changed.
        """
        seen = self.num_tokens()
        ahead, behind = max(seen.values(), default=0), min(seen.values(), default=0)
        if self.torn or (ahead != behind and self.linear):
            raise CacheError(f"this cache cannot be cropped after what was interrupted; {RESTART}")
        if ahead != behind and ahead - tokens > behind:
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
        before, self.torn = self.torn, True
        try:
            yield
        except (CacheError, UserError):
            self.torn = before
            raise
        self.torn = before


def _by_count(seen: dict[int, int]) -> str:
    """ "31 in layers 0-4, 30 in layers 5-29"."""
    runs = []
    for tokens, layers in itertools.groupby(seen, key=lambda index: seen[index]):
        first, *rest = layers
        runs.append(f"{tokens:,} in layer{f's {first}-{rest[-1]}' if rest else f' {first}'}")
    return ", ".join(runs)


class CheckedCache(Cache):
    """A cache that compares its layers once per forward pass. `progress` is made with the layers."""

    progress: Progress

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Take new tokens [B, H, n, D] into a layer: handles where our attention is installed, else all tokens decoded.

        Raises:
            CacheError: the forward pass before this one was interrupted, so that layers differ in their tokens.
        """
        if is_traced():
            layer: Any = self.layers[layer_idx]
            if layer.is_compileable:
                return layer.traced(key_states, value_states)
        self.progress.reach(layer_idx, 1)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """A linear layer's convolution state, which some models change in place."""
        self.progress.reach(layer_idx, 0)
        self.progress.end(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Take a linear layer's new convolution state."""
        self.progress.reach(layer_idx, 0)
        result = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        self.progress.end(layer_idx)
        return result

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Take a linear layer's new recurrent state."""
        self.progress.reach(layer_idx, 1 + state_idx)
        which = {"state_idx": state_idx} if state_idx else {}  # the first is what a release with one state means
        result = super().update_recurrent_state(recurrent_states, layer_idx, **which, **kwargs)
        self.progress.end(layer_idx)
        return result

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the latest tokens; `tokens_to_remove` is minus their number. After an interrupted forward pass it
        counts from the layer that has seen most, and all layers end with the same tokens.

        Raises:
            CacheError: a layer cannot take back as many; nothing has changed.
        """
        excess = self.progress.excess(-checked_crop(tokens_to_remove))
        layers: dict[int, Any] = dict(enumerate(self.layers))
        for index in layers.keys() - excess.keys():
            layers[index].crop(tokens_to_remove)  # linear layers may refuse, before others have changed
        with self.progress.changing():
            for index, tokens in excess.items():
                layers[index].crop(-tokens)

    def reset(self) -> None:
        """Forget all tokens and what was fitted on them."""
        super().reset()
        self.progress.clear()

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Follow beam search."""
        with self.progress.changing():
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch `repeats` times."""
        with self.progress.changing():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch: indices or a bool mask."""
        with self.progress.changing():
            super().batch_select_indices(indices)
