"""Layout `trellis`: a circular bit stream per token, read by overlapping windows, and a gain.

A block of t = 32 tokens of one head, with S bits for the D components of a token, has two tensors:

    stream  int16 [S/16, t]   tokens are lanes: int16 element i of all 32 tokens is contiguous
    gain    uint8 [t]         code c is 2^((c − 144)/16), except that code 0 is 0

Component d has b_d of the S bits (0 to 8, as fitted). With p_d = Σ_{e≤d} b_e, its window is bits
p_d − 8 to p_d − 1 of the circular stream. Bit i of the stream is bit (i mod S) mod 16 of element
(i mod S) // 16. The component's value is

    x̂_d = gain · scale_d · table_{b_d}[window]

With 2 bits each, component 0 reads bits −6 to 1, component 1 bits −4 to 3, component 4 bits 2 to 9.
A window of 16 bits from bit 2 d − 6 on therefore has component d in its low byte and component d +
4 in its high byte.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.trellis import gains, windows_of
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, PlaneSpec, View

WORD_BITS = 16


@functools.cache
def trellis_layout(words: int) -> Layout:
    """Return the layout of streams with this number of int16 elements."""
    return Layout(
        BLOCK_TOKENS,
        {
            "stream": PlaneSpec((words, BLOCK_TOKENS), torch.int16, "codes", token_axis=1),
            "gain": PlaneSpec((BLOCK_TOKENS,), torch.uint8, "scales and norms", token_axis=0),
        },
    )


class TrellisView(View):
    """Packed tensors of a segment and their codebooks.

    bits: uint8 [1 or B, H, D].
    scale: any float dtype, [1 or B, H, D].
    tables: float32 [9, 256], row b is the codebook for b bits.
    """

    format = kind = "trellis"

    def __init__(self, planes: PackedTensors, bits: Tensor, scale: Tensor, tables: Tensor) -> None:
        self.stream, self.gain = planes["stream"], planes["gain"]
        self.bits, self.scale, self.tables = bits, scale, tables

    @property
    def head_dim(self) -> int:
        """Number of components D."""
        return self.bits.shape[-1]

    def native(self, native: ModuleType) -> Any:
        return native.trellis(
            head_dim=self.head_dim,
            stream=self.stream,
            gain=self.gain,
            bits=self.bits,
            scale=self.scale,
            tables=self.tables,
        )

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]."""
        B, H, N, W, t = self.stream.shape
        D = self.head_dim
        words = self.stream.transpose(-1, -2).reshape(B * H, N * t, W)
        bits = self.bits.expand(B, H, D).reshape(B * H, D)
        entries = (
            self.tables[bits.long()[:, None], windows_of(words, bits)] if W else words.new_zeros((*words.shape[:2], D))
        )
        x = entries.float().view(B, H, N * t, D) * self.scale.float().unsqueeze(2)
        return x * gains(self.gain).reshape(B, H, N * t, 1)
