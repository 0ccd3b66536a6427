"""The attention layers of a cache as vectors of groups, see `storage/basis.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tersekv.cache.rotary import Rotary
from tersekv.calibration.storage_basis import SIDES, layer_groups
from tersekv.hf.base import ModelCache
from tersekv.hf.layer import CompressedLayer
from tersekv.layouts.base import Side
from tersekv.models.config import attention_layers
from tersekv.storage.codec import Span
from tersekv.transforms.rope import NO_ROPE


class Layers:
    """The attention layers of a cache, as vectors of groups.

    numbers: of a group's vectors, at most. tokens: of the sequence. heads, spans: of each group.
    """

    def __init__(self, cache: ModelCache, tokens: int, numbers: int) -> None:
        self.cache, self.tokens = cache, tokens
        self.groups = layer_groups(cache.config, numbers)
        shape = cache.shape
        self.heads = [cache.kv_heads[layers[0]] for layers in self.groups]
        self.dims = {"keys": shape.key_dim, "values": shape.value_dim}
        kinds = attention_layers(cache.config)
        self.windows = [kinds[layers[0]].window for layers in self.groups]
        self.spans: list[Span] = []
        self._angles: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def layer(self, index: int) -> CompressedLayer:
        """Return a layer of the cache."""
        layer: Any = self.cache.layers[index]
        assert isinstance(layer, CompressedLayer)
        return layer

    def cos_sin(self, index: int, first: int, n: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of n tokens of a layer, for `Rope.apply`."""
        rope = self.cache.ropes.known(index) or NO_ROPE
        if (found := self._angles.get((id(rope), first, n))) is None:  # layers share few ropes
            rotary = Rotary(rope)
            rotary.note(0, self.tokens)
            found = self._angles[id(rope), first, n] = rotary.angles(first, n, torch.device("cpu")).cos_sin()
        return found

    def forget_angles(self) -> None:
        """Free the angles of tokens that have been read."""
        self._angles.clear()

    def held(self, index: int) -> dict[Side, Tensor]:
        """Return keys and values [1, H, n, D] of the tokens that a layer holds."""
        layer = self.layer(index)
        assert layer.store is not None
        keys, values = layer.store.decoded(layer.dtype)
        return {"keys": keys.cpu(), "values": values.cpu()}

    def vectors(self, group: int, side: Side) -> Tensor:
        """Return the vectors of a group's coded tokens, float32 [tokens, n]; keys before RoPE."""
        span, parts = self.spans[group], []
        for index in self.groups[group]:
            x = self.held(index)[side][:, :, span.start - span.first :].float()
            if side == "keys":
                rope = self.cache.ropes.known(index) or NO_ROPE
                x = rope.invert(x, *self.cos_sin(index, span.start, span.coded))
            parts.append(x[0].transpose(0, 1).flatten(1))
        return torch.cat(parts, dim=1)

    def numbers(self, group: int, side: Side) -> int:
        """Return the numbers of a group's vectors."""
        return self.heads[group] * self.dims[side] * len(self.groups[group])

    def sides(self) -> Iterator[tuple[int, Side]]:
        """Yield the groups that have coded tokens, with each side."""
        for group, span in enumerate(self.spans):
            if span.coded:
                yield from ((group, side) for side in SIDES)
