"""NormalFloat: a table of normal quantiles times a scale per group (QLoRA, arXiv 2305.14314, §3, Eq. 4).

The table holds 2^{b-1} positive quantiles, zero, and 2^{b-1} − 1 negative ones, normalised to [−1, 1]; at 4 bits it is
bitsandbytes' NF4. Scale: the group's largest magnitude (`zero_point=false`, QLoRA), or half its range with the
mid-point as offset (`zero_point=true`, as KVQuant's nf comparators normalise).
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
    """bits: 2 to 8. axis: "token" or "channel". group: elements per scale; 0 for all channels of a token."""

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
        """The memory layout."""
        dtype = SCALE_DTYPES[self.scales]
        return Grid(self.bits, self.side, self.axis, self.group, self.zero_point, head_dim, dtype)

    def layout(self, head_dim: int) -> Layout:
        """codes, scale and, with a zero point, offset."""
        return self.grid(head_dim).layout()

    def encode(self, x: Tensor) -> PackedTensors:
        """x float32 [B, H, N·t, D] to planes."""
        grid, dtype = self.grid(x.shape[-1]), SCALE_DTYPES[self.scales]
        low, high = backends.group_ranges(x, grid.place)
        offset = None
        if self.zero_point:
            offset = round_scale((low + high) / 2, dtype, "a mid-point")
            low, high = low - offset.float(), high - offset.float()
        scale = round_scale(torch.maximum(low.abs(), high.abs()), dtype, "a scale")
        return grid.encode(x, normal_quantiles(self.bits, str(x.device)), scale, offset)

    def view(self, planes: PackedTensors, head_dim: int) -> GridView:
        """Codes with the table of normal quantiles."""
        return GridView(self.grid(head_dim), planes, normal_quantiles(self.bits, str(planes["codes"].device)))

    def table_bytes(self, head_dim: int) -> TableBytes:
        """The quantiles, float32."""
        return TableBytes({f"normal quantiles {self.bits}": 4 * 2**self.bits})

    def tables(self, head_dim: int) -> list[Tensor]:
        """The tensors behind `table_bytes`."""
        return [normal_quantiles(self.bits, "cpu")]


METHOD = Method("NormalFloat", "QLoRA, arXiv 2305.14314", for_both_sides(NormalFloat))
