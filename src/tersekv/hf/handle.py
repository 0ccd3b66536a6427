"""Handles that `CompressedCache.update` returns to our attention function in place of key and value
tensors."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tersekv.cache.segments import UNSEEN, Observed
from tersekv.cache.store import Store


class PendingLayer(Protocol):
    """Interface of the layer that pending tokens belong to."""

    cache: Any

    @property
    def store(self) -> Store | None:
        """The cache of the layer, or None before its first tokens."""

    def get_seq_length(self) -> int:
        """Return the number of tokens seen."""

    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None, observed: Observed = UNSEEN) -> None:
        """Append tokens to the store, at once or with those of other layers."""

    def add(self, keys: Tensor, values: Tensor, padding: Tensor | None, observed: Observed) -> None:
        """Append tokens to the store."""

    def append_and_decode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens and return all tokens, decoded."""


class Pending:
    """Keys and values [B, H, n, D] of one call to one layer, which are appended to the store
    exactly once."""

    def __init__(self, layer: PendingLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values
        assert layer.store is not None
        self.past_tokens = layer.store.num_tokens
        self.committed = False
        self._decoded: tuple[Tensor, Tensor] | None = None

    def drop_last(self, n: int) -> None:
        """Leave out the n last tokens, which are a second reading of the others."""
        self.keys, self.values = (x[:, :, :-n].contiguous() for x in (self.keys, self.values))

    def commit(self, padding: Tensor | None, observed: Observed = UNSEEN) -> None:
        """Append the tokens to the store. observed: see `LayerStore`."""
        self.committed, layer = True, self.layer
        # a step waits for no other layer, except for rates
        append = layer.append if self.keys.shape[2] > 1 or layer.cache.waiting.rated else layer.add
        append(self.keys, self.values, padding, observed)

    def decoded(self) -> tuple[Tensor, Tensor]:
        """Return all tokens [B, H, tokens, D]. If the tokens are not committed yet, commit them and
        return them exact; otherwise return them as the store decodes them. Warn once if there are earlier ones."""
        if self._decoded is None:
            if self.past_tokens:
                self.layer.cache.warn_decoding()
            if self.committed:
                self.layer.cache.waiting.finish()
                assert self.layer.store is not None
                self._decoded = self.layer.store.decoded(self.keys.dtype)
            else:
                self.committed = True
                self._decoded = self.layer.append_and_decode(self.keys, self.values)
        return self._decoded


class PendingTokens:
    """Handle for the keys or the values of a layer.

    Attention modules pass it unchanged from `update` to the attention function, which reads the
    store and then commits. Any other use decodes the whole tensor and commits, which is slower but
    correct.

    copies: number of times that the heads are repeated, one after the other.
    """

    def __init__(self, pending: Pending, is_values: bool, copies: int = 1) -> None:
        self.pending, self.is_values, self.copies = pending, is_values, copies

    @property
    def _new(self) -> Tensor:
        return self.pending.values if self.is_values else self.pending.keys

    @property
    def shape(self) -> torch.Size:
        """Shape of the decoded tensor."""
        B, H, n, D = self._new.shape
        return torch.Size((B, H * self.copies, self.pending.past_tokens + n, D))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the new tokens."""
        return self._new.dtype

    @property
    def device(self) -> torch.device:
        """Device of the new tokens."""
        return self._new.device

    def decoded(self) -> Tensor:
        """Return the tensor, see `Pending.decoded`."""
        decoded = self.pending.decoded()[int(self.is_values)]
        return decoded if self.copies == 1 else decoded.repeat(1, self.copies, 1, 1)

    def repeat(self, *sizes: int) -> PendingTokens | Tensor:
        """Return a handle if only heads are repeated, which JetMoe does before attention, else the tensor."""
        if self.copies == 1 and len(sizes) == 4 and sizes[::2] + sizes[3:] == (1, 1, 1):
            return PendingTokens(self.pending, self.is_values, sizes[1])
        return self.decoded().repeat(*sizes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("pending", "is_values", "copies"):
            raise AttributeError(name)
        return getattr(self.decoded(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.decoded()[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*opened(args), **opened(kwargs or {}))


def opened(x: Any) -> Any:
    """Return x with handles replaced by decoded tensors, also inside tuples, lists and dicts."""
    if isinstance(x, PendingTokens):
        return x.decoded()
    if isinstance(x, (list, tuple)):
        return type(x)(opened(item) for item in x)
    if isinstance(x, dict):
        return {key: opened(value) for key, value in x.items()}
    return x
