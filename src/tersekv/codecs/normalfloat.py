"""NormalFloat: a codebook of normal quantiles, times a scale per group (QLoRA, arXiv 2305.14314,
§3, Eq. 4).

The codebook holds 2^{b-1} positive quantiles, zero, and 2^{b-1} − 1 negative ones, normalised to
[−1, 1]. At 4 bits it is bitsandbytes' NF4. With `zero_point=false` (QLoRA) the scale is the group's
largest magnitude. With `zero_point=true` it is half the range, and the mid-point is the offset, as
in KVQuant's nf baselines.

Good for: comparisons with NF4.
Bad for: quality: turboquant:bits=4 diverges a third as much with as many bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, Method, TableBytes, check_choices, check_range, for_both_sides
from tersekv.codecs.codebooks.fixed import normal_quantiles
from tersekv.kernels import backends
from tersekv.layouts.base import Layout, PackedTensors
from tersekv.layouts.grid import SCALE_DTYPES, Grid, GridView, round_scale


@dataclass(frozen=True)
class NormalFloat(Codec):
    """One side of NormalFloat.

    bits: 2 to 8.
    axis: "token" or "channel".
    group: elements per scale, 0 for all channels of a token.
    zero_point: store an offset per group.
    scales: dtype of scales and offsets.
    """

    bits: int = 4
    axis: Literal["token", "channel"] = "token"
    group: int = 64
    zero_point: bool = False
    scales: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 2, 8)
        check_choices(self)
        check_range("group", self.group, 1 if self.axis == "channel" else 0, 1024)

    def grid(self, head_dim: int) -> Grid:
        """Return the memory layout."""
        dtype = SCALE_DTYPES[self.scales]
        return Grid(self.bits, self.side, self.axis, self.group, self.zero_point, head_dim, dtype)

    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors: codes, scale and, with a zero point, offset."""
        return self.grid(head_dim).layout()

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x float32 [B, H, N·t, D] as packed tensors."""
        grid, dtype = self.grid(x.shape[-1]), SCALE_DTYPES[self.scales]
        low, high = backends.group_ranges(x, grid.place)
        offset = None
        if self.zero_point:
            offset = round_scale((low + high) / 2, dtype, "a mid-point")
            low, high = low - offset.float(), high - offset.float()
        scale = round_scale(torch.maximum(low.abs(), high.abs()), dtype, "a scale")
        return grid.encode(x, normal_quantiles(self.bits, str(x.device)), scale, offset)

    def view(self, planes: PackedTensors, head_dim: int) -> GridView:
        """Return the view of codes with the codebook of normal quantiles."""
        return GridView(self.grid(head_dim), planes, normal_quantiles(self.bits, str(planes["codes"].device)))

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of the codebook, float32."""
        return TableBytes({f"normal quantiles {self.bits}": 4 * 2**self.bits})

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        return [normal_quantiles(self.bits, "cpu")]


METHOD = Method("NormalFloat", "QLoRA, arXiv 2305.14314", for_both_sides(NormalFloat))
