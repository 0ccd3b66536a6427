"""What `CompressedCache.update` hands to our attention in place of key and value tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tersekv.hf.cache import CompressedLayer


class PendingTokens:
    """The keys or values of the tokens of one call, not in the store yet.

    Attention modules pass it on untouched from `update` to the attention function, which reads the store and then
    commits. Anything else that opens it gets the decoded tensor [B, H, tokens, D] and commits by that, slower but
    right.
    """

    def __init__(self, layer: CompressedLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values
        self.past_tokens = layer.get_seq_length()
        self._decoded: tuple[Tensor, Tensor] | None = None
        self.is_values = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor this stands for."""
        x = self.values if self.is_values else self.keys
        return torch.Size((*x.shape[:2], self.past_tokens + x.shape[2], x.shape[3]))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the new tokens."""
        return self.keys.dtype

    @property
    def device(self) -> torch.device:
        """Device of the new tokens."""
        return self.keys.device

    def for_values(self) -> PendingTokens:
        """The handle that stands for the values; both commit once."""
        twin = PendingTokens.__new__(PendingTokens)
        twin.__dict__ = self.__dict__ | {"is_values": True, "_keys_handle": self}
        return twin

    def decoded(self) -> Tensor:
        """Commit and return the tensor."""
        owner: PendingTokens = self.__dict__.get("_keys_handle", self)
        if owner._decoded is None:
            owner._decoded = self.layer.append_and_decode(self.keys, self.values)
        return owner._decoded[int(self.is_values)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_keys_handle":
            raise AttributeError(name)
        return getattr(self.decoded(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.decoded()[index]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_open(args), **_open(kwargs or {}))


def _open(x: Any) -> Any:
    """Handles inside args, lists and dicts replaced by tensors."""
    if isinstance(x, PendingTokens):
        return x.decoded()
    if isinstance(x, (list, tuple)):
        return type(x)(_open(item) for item in x)
    if isinstance(x, dict):
        return {key: _open(value) for key, value in x.items()}
    return x
