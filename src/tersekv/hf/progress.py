"""Detect a forward pass that was interrupted between two layers (KeyboardInterrupt, out of memory).

Layers append tokens one after the other. If layers held different numbers of tokens, attention
would be wrong without an error. Therefore layers are compared once per forward pass, before the
first one changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import LongTensor, Tensor
from transformers.cache_utils import Cache

from tersekv.errors import CacheError, UserError
from tersekv.hf.key_check import MOST_KEPT, check_keys, kept_keys
from tersekv.hf.token_ids import TokenIds
from tersekv.hf.traced import is_traced

NOWHERE = (-1, 0)
RESTART = "start again with cache.reset() or a new cache"


def checked_crop(tokens_to_remove: int) -> int:
    """Return the argument of `crop` as an int; raise UserError if it is positive."""
    tokens_to_remove = int(tokens_to_remove)  # releases before 5.17 pass a tensor
    if tokens_to_remove > 0:
        raise UserError(f"crop takes minus the number of tokens to remove, got {tokens_to_remove}; pass 0 or less")
    return tokens_to_remove


class CountingLayer(Protocol):
    """Interface of a layer that counts its tokens and can tell whether some can be removed.

    record_past: True if a sliding window evicts at a crop only.
    """

    record_past: bool

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""

    def check_crop(self, tokens: int) -> None:
        """Raise CacheError unless the latest `tokens` tokens can be removed."""


class Progress:
    """Progress of the layers of one cache through the current forward pass.

    attention: layers that append every token, by index.
    linear: indices of layers with a recurrent state, which counts no tokens and cannot be cropped.
    """

    def __init__(self, attention: Mapping[int, CountingLayer], linear: Collection[int]) -> None:
        self.attention, self.linear = attention, linear
        self.clear()

    def clear(self) -> None:
        """Reset the state, once all layers are empty."""
        self.freed = 0  # bytes of exact prompts freed since memory was returned to the system
        self.encoded = -1  # tokens of a layer at the last call that encoded for all layers
        self.torn = False  # True while a layer changes; stays True if that change is interrupted
        self.unchecked: dict[int, Tensor] = {}  # this pass's keys by layer, see `check_keys`
        self.steps, self.last, self.done, self.handles = 0, NOWHERE, {}, None

    handles: bool | None
    """True if this pass hands out handles of tokens, None before its first layer: transformers takes long to read a
    config."""
    steps: int
    """Number of forward passes begun. Without a hook the first pass is not counted."""
    last: tuple[int, int]
    """Latest (layer, state) that this pass has reached."""
    done: dict[int, int]
    """Latest forward pass of each layer; kept only if there are linear layers."""

    def start(self) -> None:
        """Begin a forward pass.

        Raises:
            CacheError: the previous pass was interrupted.
        """
        self.check()
        self.steps += 1
        self.last, self.handles, self.unchecked = NOWHERE, None, {}

    def reach(self, layer: int, state: int) -> None:
        """Record that a layer is about to read or change a state.

        If no hook has called `start`, a layer that is not after the previous one begins a new pass.
        state: its number, or 0 for one that may be reached more than once per pass.

        Raises:
            CacheError: the previous pass was interrupted.
        """
        if (layer, state) < self.last or (state and (layer, state) == self.last):
            self.start()
        self.last = layer, state

    def keep_keys(self, layer: int, keys: Tensor) -> None:
        """Keep a sample of a layer's new keys [B, H, n, D], to check those of all layers together."""
        self.unchecked[layer] = kept_keys(keys)
        if sum(x.numel() for x in self.unchecked.values()) >= MOST_KEPT:
            self.check_keys()

    def check_keys(self) -> None:
        """Check the keys that are kept."""
        unchecked, self.unchecked = self.unchecked, {}
        check_keys(self.attention, unchecked)

    def end(self, layer: int) -> None:
        """Record that a layer has appended its tokens."""
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
        missing = {*self.linear, *self.attention} - self.done.keys() if in_cache else ()
        if len(set(self.done.values())) > 1 or missing:
            raise CacheError(f"a forward pass was interrupted, and linear layers cannot be rolled back; {RESTART}")

    def num_tokens(self) -> dict[int, int]:
        """Return the number of tokens seen, by layer."""
        return {index: layer.get_seq_length() for index, layer in self.attention.items()}

    def excess(self, tokens: int) -> dict[int, int]:
        """Return the number of tokens to remove from each layer, so that all have `tokens` fewer
        than the longest.

        Raises:
            CacheError: a layer has fewer tokens already, or cannot remove them; nothing has
                changed.
        """
        seen = self.num_tokens()
        ahead, behind = max(seen.values(), default=0), min(seen.values(), default=0)
        if self.torn or (ahead != behind and self.linear):
            raise CacheError(f"this cache cannot be cropped after the interruption; {RESTART}")
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
        return f"undo the pass with cache.crop({behind - ahead}) and run it again"

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the cache as torn during a change of several layers. Our own errors restore the
        mark, because they are raised before any change."""
        before, self.torn = self.torn, True
        try:
            yield
        except (CacheError, UserError):
            self.torn = before
            raise
        self.torn = before


def _by_count(seen: dict[int, int]) -> str:
    """Return numbers of tokens by layers as text, such as "31 in layers 0-4, 30 in layers 5-29"."""
    runs = []
    for tokens, layers in itertools.groupby(seen, key=lambda index: seen[index]):
        first, *rest = layers
        runs.append(f"{tokens:,} in layer{f's {first}-{rest[-1]}' if rest else f' {first}'}")
    return ", ".join(runs)


class CheckedCache(Cache):
    """A cache that compares its layers once per forward pass. Subclasses set `progress` and
    `token_ids` when they create the layers."""

    progress: Progress
    token_ids: TokenIds

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Pass new tokens [B, H, n, D] to a layer. Return handles if our attention is installed,
        else all tokens decoded.

        Raises:
            CacheError: the previous forward pass was interrupted, so layers differ in their tokens.
        """
        if is_traced():
            layer: Any = self.layers[layer_idx]
            if layer.is_compileable:
                return layer.traced(key_states, value_states)
        self.progress.reach(layer_idx, 1)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return a linear layer's convolution state, which some models change in place."""
        self.progress.reach(layer_idx, 0)
        self.progress.end(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store a linear layer's new convolution state."""
        self.progress.reach(layer_idx, 0)
        result = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        self.progress.end(layer_idx)
        return result

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Store a linear layer's new recurrent state."""
        self.progress.reach(layer_idx, 1 + state_idx)
        which = {"state_idx": state_idx} if state_idx else {}  # releases with one state lack it
        result = super().update_recurrent_state(recurrent_states, layer_idx, **which, **kwargs)
        self.progress.end(layer_idx)
        return result

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the latest tokens; `tokens_to_remove` is minus their number.

        After an interrupted forward pass it counts from the layer with most tokens, and all layers
        end with the same tokens.

        Raises:
            CacheError: a layer cannot remove that many; nothing has changed.
        """
        excess = self.progress.excess(-checked_crop(tokens_to_remove))
        layers: dict[int, Any] = dict(enumerate(self.layers))
        for index in layers.keys() - excess.keys():
            layers[index].crop(tokens_to_remove)  # linear layers may refuse, before others have changed
        with self.progress.changing():
            for index, tokens in excess.items():
                layers[index].crop(-tokens)
        self.token_ids.crop(self.get_seq_length())

    def reset(self) -> None:
        """Remove all tokens and everything that codecs fitted on them. Assisted decoding, if any, has ended."""
        with torch.inference_mode():  # linear layers fill their tensors, which a pass in this mode may have made
            super().reset()
        for layer in self.progress.attention.values():
            layer.record_past = False
        self.progress.clear()
        self.token_ids.crop(0)

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Select the rows `beam_idx` that beam search continues."""
        with self.progress.changing():
            super().reorder_cache(beam_idx)
            self.token_ids.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch `repeats` times."""
        with self.progress.changing():
            super().batch_repeat_interleave(repeats)
            self.token_ids.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows of the batch. indices: row numbers or a bool mask."""
        with self.progress.changing():
            super().batch_select_indices(indices)
            self.token_ids.select(indices)
