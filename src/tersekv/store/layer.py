"""The cache of one layer: exact sinks | packed blocks | exact tail, in the order of the tokens.

Append-only: what is packed is never decoded and packed again. Tokens are rounded to the exact type first and packed from that,
and blocks start at fixed positions, so that the packed bytes do not depend on how tokens were fed (unless a codec is
fitted on the prompt).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.codecs import Codec
from tersekv.errors import CacheError
from tersekv.formats.base import View
from tersekv.recipe import LayerPlan
from tersekv.store.blocks import BlockBuffer, TailBuffer
from tersekv.store.footprint import Footprint

ENCODE_TOKENS = 1024
"""Tokens encoded at a time, which bounds the float32 copies that encoding makes."""

ROLLBACK_TOKENS = 128
"""Tokens kept beyond a sliding window, so that assisted decoding can take back what it had proposed."""


class ExactSegment(NamedTuple):
    """Tokens kept as floats [B, H, T, D]; positions: of the first one, or int64 [B, T] where batch rows differ."""

    keys: Tensor
    values: Tensor
    positions: Tensor | int


class PackedSegment(NamedTuple):
    """Tokens kept as codes; token i stands at position first + i."""

    keys: View
    values: View
    first: int
    tokens: int


class LayerStore:
    """Keys and values of one layer, created with the shapes of the first tokens.

    Shapes: keys [B, H, n, Dk], values [B, H, n, Dv]. `window` is the layer's sliding window in tokens, None for full attention.
    """

    def __init__(self, plan: LayerPlan, keys: Tensor, values: Tensor, window: int | None = None) -> None:
        B, H, _, self.key_dim = keys.shape
        self.value_dim = values.shape[-1]
        self.key_codec: Codec = plan.keys
        self.value_codec: Codec = plan.values
        self.window = window
        self.sink_capacity = 0 if window is not None else plan.policy.sinks
        self.recent = plan.policy.recent
        self.dtype = plan.policy.exact_dtype(keys.dtype)
        layouts = plan.keys.layout(self.key_dim), plan.values.layout(self.value_dim)
        self.flush_tokens = math.lcm(*(layout.block_tokens for layout in layouts))
        self.packed = tuple(BlockBuffer(layout, B, H, keys.device) for layout in layouts)
        capacity = self.recent + self.flush_tokens
        self.tail = tuple(TailBuffer(B, H, x.shape[-1], self.dtype, x.device, capacity) for x in (keys, values))
        self.sinks: tuple[Tensor, Tensor] = tuple(x[:, :, :0].to(self.dtype) for x in (keys, values))  # type: ignore
        self.padding: Tensor | None = None
        self.seen = 0
        self.dropped = 0

    # ------------------------------------------------------------------ growing

    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None) -> None:
        """Add tokens and pack what has left the window.

        padding: int64 [B], leading positions of each batch row that hold no token, known from the first mask; each
        row's own first tokens then become its sinks.
        """
        first, n = self.seen == 0, keys.shape[2]
        keys, values = self._rounded(keys), self._rounded(values)
        self.seen += n
        if first and padding is not None and int(padding.max()) > 0:
            keys, values = self._start_padded(keys, values, padding)
        keys, values = self._fill_sinks(keys, values)
        waiting = self.tail[0].tokens + keys.shape[2]
        flush = max(0, waiting - self.recent) // self.flush_tokens * self.flush_tokens
        if flush:
            self._fit(keys, values)
            skip = self._drop_outside_window(flush)
            for side in (0, 1):
                self._pack(side, (keys, values)[side], skip, flush)
        else:
            for tail, x in zip(self.tail, (keys, values), strict=True):
                tail.append(x)

    def _rounded(self, x: Tensor) -> Tensor:
        rounded = x.detach().to(self.dtype)
        # elsewhere than on a CPU a check would wait for the device at every token
        if (x.device.type == "cpu" or x.shape[2] > 1) and not math.isfinite(float((rounded * 0).sum())):
            raise CacheError(self._why_not_finite(x))
        return rounded

    def _why_not_finite(self, x: Tensor) -> str:
        if not bool(torch.isfinite(x).all()):
            return "NaN or Inf; the model's own computation has overflowed (try bfloat16 or float32 weights)"
        return (
            f"values up to {float(x.abs().max()):.3g}, which {str(self.dtype).removeprefix('torch.')} cannot hold; "
            "use the policy option exact=bf16 or exact=fp32 (window:exact=bf16+…)"
        )

    def _start_padded(self, keys: Tensor, values: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Replace what stands in the padding by the row's last token, so that neither scales nor fitted channels see it, and
        give each row its own sinks. Rows too short for that keep the common ones. Returns what is left after the sinks."""
        hidden = (torch.arange(self.seen, device=keys.device) < padding[:, None])[:, None, :, None]
        keys, values = (torch.where(hidden, x[:, :, -1:], x) for x in (keys, values))
        S = self.sink_capacity
        if S == 0 or int(padding.max()) + S > self.seen:
            return keys, values
        self.padding = padding
        own = self._own_sinks()[:, None, :, None]
        self.sinks = tuple(x.gather(2, own.expand(-1, x.shape[1], -1, x.shape[-1])) for x in (keys, values))  # type: ignore
        return keys[:, :, S:], values[:, :, S:]

    def _fill_sinks(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        n = min(self.sink_capacity - self.sinks[0].shape[2], keys.shape[2])
        if n > 0:
            new = zip(self.sinks, (keys, values), strict=True)
            self.sinks = tuple(torch.cat([sink, x[:, :, :n]], dim=2) for sink, x in new)  # type: ignore
            keys, values = keys[:, :, n:], values[:, :, n:]
        return keys, values

    def _fit(self, keys: Tensor, values: Tensor) -> None:
        """Fit codecs that learn from the prompt, once, on all tokens at hand."""
        names = "key_codec", "value_codec"
        for name, sink, tail, x in zip(names, self.sinks, self.tail, (keys, values), strict=True):
            codec: Codec = getattr(self, name)
            if codec.fits_on == "prompt" and not codec.fitted:
                setattr(self, name, codec.fit(torch.cat([sink, tail.data, x], dim=2).float()))

    def _drop_outside_window(self, flush: int) -> int:
        """Forget packed tokens that no coming query can see, a rollback of ROLLBACK_TOKENS included. Returns how many of
        the `flush` tokens about to be packed are outside too and need not be."""
        if self.window is None:
            return 0
        outside = (self.seen - self.window - ROLLBACK_TOKENS - self.dropped) // self.flush_tokens * self.flush_tokens
        packed = min(max(0, outside), self.packed_tokens)
        for buffer in self.packed:
            buffer.drop_front(packed // buffer.layout.block_tokens)
        skip = min(max(0, outside) - packed, flush)
        self.dropped += packed + skip
        return skip

    def _pack(self, side: int, x: Tensor, skip: int, flush: int) -> None:
        """Encode tokens `skip` to `flush` of tail and new ones; what follows them becomes the tail."""
        codec = (self.key_codec, self.value_codec)[side]
        packed, tail = self.packed[side], self.tail[side]
        old = tail.tokens
        packed.reserve((flush - skip) // packed.layout.block_tokens)
        step = max(1, ENCODE_TOKENS // self.flush_tokens) * self.flush_tokens
        for start in range(skip, flush, step):
            stop = min(flush, start + step)
            parts = [tail.data[:, :, start : min(stop, old)], x[:, :, max(0, start - old) : max(0, stop - old)]]
            packed.append(codec.encode(torch.cat(parts, dim=2).float()))
        tail.drop_front(min(flush, old))
        tail.append(x[:, :, max(0, flush - old) :])

    # ------------------------------------------------------------------ reading

    @property
    def packed_tokens(self) -> int:
        """Tokens held as codes."""
        return self.packed[0].tokens

    @property
    def packed_first(self) -> int:
        """Position of the first packed token."""
        return (self.sink_capacity if self.padding is not None else self.sinks[0].shape[2]) + self.dropped

    def exact_segments(self) -> list[ExactSegment]:
        """Sinks and tail, those that hold tokens."""
        segments = []
        if self.sinks[0].shape[2]:
            segments.append(ExactSegment(*self.sinks, 0 if self.padding is None else self._own_sinks()))
        if self.tail[0].tokens:
            segments.append(ExactSegment(self.tail[0].data, self.tail[1].data, self.seen - self.tail[0].tokens))
        return segments

    def _own_sinks(self) -> Tensor:
        """Positions [B, S] of each row's own sinks."""
        assert self.padding is not None
        return self.padding[:, None] + torch.arange(self.sink_capacity, device=self.padding.device)

    def packed_segment(self, first: int = 0, tokens: int | None = None) -> PackedSegment | None:
        """Packed tokens `first` to `first + tokens` (multiples of `flush_tokens`), or None if there are none."""
        tokens = self.packed_tokens - first if tokens is None else min(tokens, self.packed_tokens - first)
        if tokens <= 0:
            return None
        views = []
        dims = self.key_dim, self.value_dim
        for codec, packed, dim in zip((self.key_codec, self.value_codec), self.packed, dims, strict=True):
            t = packed.layout.block_tokens
            views.append(codec.view(packed.planes(first // t, (first + tokens) // t), dim))
        return PackedSegment(views[0], views[1], self.packed_first + first, tokens)

    def decoded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All tokens as [B, H, seen − dropped, D], position by position (rows with their own sinks included)."""
        packed = self.packed_segment()
        first = self.packed_first
        sides = []
        for i in (0, 1):
            sink, tail = self.sinks[i], self.tail[i].data
            parts = [sink.to(dtype)[:, :, : first - self.dropped]]
            if packed is not None:
                parts.append((packed.keys, packed.values)[i].decode().to(dtype))
            x = torch.cat([*parts, tail.to(dtype)], dim=2)
            if self.padding is not None:
                own = self._own_sinks()[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
                x = x.scatter(2, own, sink.to(dtype))
            sides.append(x)
        return sides[0], sides[1]

    # ------------------------------------------------------------------ changing

    def crop(self, n: int) -> None:
        """Take back the n latest tokens. Where that reaches into packed blocks, whole blocks go and the tokens that stay of
        the last one return to the tail as decoded."""
        if n > self.seen:
            raise CacheError(f"cannot take back {n} tokens, only {self.seen} were seen")
        if self.padding is not None and 0 < self.seen - n < int(self.padding.max()) + self.sink_capacity:
            raise CacheError(
                f"cannot take back {n} of {self.seen} tokens: rows of a left-padded batch would lose their first tokens; "
                "reset the cache instead"
            )
        if self.window is not None and self.dropped > max(0, self.seen - n - self.window + 1):
            raise CacheError(
                f"cannot take back {n} tokens of a layer with sliding window {self.window}; "
                f"{ROLLBACK_TOKENS} are kept for that"
            )
        self.seen -= n
        from_tail = min(n, self.tail[0].tokens)
        for tail in self.tail:
            tail.drop_back(from_tail)
        n -= from_tail
        if n and self.packed_tokens:
            n -= self._crop_packed(min(n, self.packed_tokens))
        if n:
            self.sinks = tuple(x[:, :, : max(0, x.shape[2] - n)] for x in self.sinks)  # type: ignore
            self.padding = None

    def _crop_packed(self, n: int) -> int:
        blocks = -(-n // self.flush_tokens)
        keep = blocks * self.flush_tokens - n
        if keep:
            last = self.packed_segment(self.packed_tokens - blocks * self.flush_tokens, self.flush_tokens)
            assert last is not None
            for tail, view in zip(self.tail, (last.keys, last.values), strict=True):
                tail.append(view.decode()[:, :, :keep].to(self.dtype))
        for packed in self.packed:
            packed.drop_back(blocks * self.flush_tokens // packed.layout.block_tokens)
        return n

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` (int64, repeats allowed) in that order."""
        for buffer in (*self.packed, *self.tail):
            buffer.map(lambda x: x.index_select(0, rows.to(x.device)))
        self.sinks = tuple(x.index_select(0, rows.to(x.device)) for x in self.sinks)  # type: ignore
        self.key_codec, self.value_codec = self.key_codec.select(rows), self.value_codec.select(rows)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, rows)

    def to(self, device: torch.device | str) -> None:
        """Move everything to `device`."""
        for buffer in (*self.packed, *self.tail):
            buffer.map(lambda x: x.to(device))
        self.sinks = tuple(x.to(device) for x in self.sinks)  # type: ignore
        self.key_codec, self.value_codec = self.key_codec.to(device), self.value_codec.to(device)
        self.padding = None if self.padding is None else self.padding.to(device)

    def tables(self) -> list[Tensor]:
        """Tables beside the planes, both sides; shared ones are the same objects in every layer."""
        return [*self.key_codec.tables(self.key_dim), *self.value_codec.tables(self.value_dim)]

    def footprint(self) -> Footprint:
        """Bytes held, without tables."""
        B, H, S, _ = self.sinks[0].shape
        footprint = Footprint(self.seen, B * H * self.seen * (self.key_dim + self.value_dim))
        footprint.parts["exact sinks"] = sum(x.numel() * x.element_size() for x in self.sinks)
        for buffer in (*self.packed, *self.tail):
            buffer.count(footprint)
        return footprint
