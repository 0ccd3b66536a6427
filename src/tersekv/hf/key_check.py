"""Error of the keys of layers, measured once the first ones are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.cache.rotary import Rotary
from tersekv.cache.store import Store
from tersekv.calibration.key_error import (
    LARGE_MEAN,
    LEAST_TOKENS,
    KeyFigures,
    key_error,
    largest_means,
    sample_tokens,
)
from tersekv.errors import UserError
from tersekv.tensors import plain
from tersekv.threads import one_thread
from tersekv.transforms.angles import Angles
from tersekv.transforms.rope import NO_ROPE, Rope

MOST_KEPT = 1 << 20
"""Elements of `kept_keys` from which those of a pass are checked before its end."""


class Latest(NamedTuple):
    """The latest keys x [B, H, n, D] of a layer.

    rope: of the layer. place: that of the first of them. sinks: exact tokens before all others.
    """

    layer: Any
    store: Store
    rope: Rope
    x: Tensor
    place: int
    sinks: int

    @property
    def alike(self) -> tuple[Any, ...]:
        """Attributes that layers share whose means are computed together."""
        x = self.x
        return id(self.rope), self.place, self.sinks, x.shape, x.dtype, x.device

    def angles(self, n: int) -> Angles:
        """Return those of n tokens."""
        rotary = self.store.rotary or Rotary(self.rope)
        if self.store.rotary is None:
            rotary.note(0, self.store.num_tokens, self.store.padding)
        return rotary.angles(self.place, n, self.x.device)

    def counts(self) -> Tensor:
        """Return which tokens count, bool [1 or B, n]."""
        positions = torch.arange(self.place, self.place + self.x.shape[2], device=self.x.device)
        padding = self.store.padding
        before = torch.zeros_like(positions[:1]) if padding is None else padding.to(self.x.device)
        return positions >= (before + self.sinks).unsqueeze(1)


def kept_keys(keys: Tensor) -> Tensor:
    """Return a copy of the keys [B, H, n, D] of a call that `check_keys` needs at the end of the pass."""
    return keys[:, :, -max(1, sample_tokens(keys.shape[2], keys.shape[0])) :].detach().clone()


@plain
def check_keys(layers: Mapping[int, Any], waiting: Mapping[int, Tensor]) -> None:
    """Measure the error of the keys of layers that have just packed tokens, and warn if one is large.

    layers: `CompressedLayer` by index. waiting: `kept_keys` of the latest call of some of them.
    """
    groups: dict[Any, list[Latest]] = {}
    with one_thread(sum(keys.numel() for keys in waiting.values())):
        for index, keys in waiting.items():
            known, latest = _latest(layers[index], keys)
            if latest is None:
                layers[index].measured = known
            else:
                groups.setdefault(latest.alike, []).append(latest)
        for group in groups.values():
            for latest in _suspicious(group):
                figures = _figures(latest)
                if figures is not None and figures.is_large:
                    latest.layer.cache.warn_of_keys(latest.layer.index, figures)
            for latest in group:
                latest.layer.measured = True
    NO_ROPE.forget()


def _latest(layer: Any, keys: Tensor) -> tuple[bool, Latest | None]:
    """Return if the layer needs no look later, and the keys to look at now, if there are enough.

    keys: of the present call, which end with the store's latest token.
    """
    store, rope = layer.store, layer.cache.ropes.known(layer.index)
    if not store.packed_tokens:
        return False, None
    if store.keys.codec.centred:  # the mean is gone, so it cannot drown differences
        return True, None
    keys = (keys if keys.shape[2] >= LEAST_TOKENS else store.recent.keys).detach()
    n = sample_tokens(keys.shape[2], keys.shape[0])
    if not n:  # later calls leave more tokens exact
        return False, None
    x = keys[:, :, -n:].to(store.recent.keys.dtype)
    sinks = store.policy.sink_tokens(store.window)
    own = store.rotary.rope if store.rotary else rope or NO_ROPE
    return True, Latest(layer, store, own, x, store.num_tokens - n, sinks)


def _suspicious(group: Sequence[Latest]) -> Sequence[Latest]:
    """Return the layers that may have a large mean. Means are computed together, unless layers have padding, a part of
    the heads, or RoPE that varies."""
    first = group[0]
    angles, counts = first.angles(first.x.shape[2]), first.counts()
    if first.rope.varies or max(len(angles.places), len(counts)) > 1 or any(latest.store.heads for latest in group):
        return group
    means = largest_means(torch.cat([latest.x for latest in group]), angles, counts).view(len(group), -1).amax(1)
    return [latest for latest, large in zip(group, (means > LARGE_MEAN).tolist(), strict=True) if large]


def _figures(latest: Latest) -> KeyFigures | None:
    """Return the error of a layer's keys; None if a scale is too large."""
    store, x, counts = latest.store, latest.x, latest.counts()
    codec = store.keys.codec
    if missing := -x.shape[2] % codec.layout(x.shape[-1]).block_tokens:  # whole blocks are coded
        x = torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
        counts = torch.nn.functional.pad(counts, (0, missing))
    try:
        return key_error(codec, x, latest.angles(x.shape[2]), counts, store.heads)
    except UserError:  # a scale of tokens that are packed later is too large
        return None
