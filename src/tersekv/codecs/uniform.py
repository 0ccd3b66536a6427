"""Uniform integers per token or per channel, in groups.

x̂ = min + scale·code with scale = (max − min)/(2^b − 1).

int-X caches (FlexGen, arXiv 2303.06865: group 64; Atom, arXiv 2310.19102: group 128) and KIVI
(arXiv 2402.02750, §3) use this method. Scale and minimum are rounded to 16 bits before codes are
chosen. A constant group has scale 0 and decodes to its minimum. `group=0` with axis=token means one
range per token. With axis=channel it means one range per channel, fitted on the prompt and kept for
the whole sequence; later values outside it are clamped.

Good for: any number of bits per token or channel, as a plain baseline.
Bad for: 2 and 3 bits, where fitted codebooks lose less.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from tersekv.codecs.base import (
    Codec,
    FitsOn,
    Method,
    TableBytes,
    check_choices,
    check_range,
    for_both_sides,
    whole_bits,
)
from tersekv.codecs.codebooks.fixed import integers
from tersekv.errors import UserError
from tersekv.kernels import backends
from tersekv.layouts.base import Layout, PackedTensors
from tersekv.layouts.grid import SCALE_DTYPES, Grid, GridView, round_scale
from tersekv.tensors import TensorSpec

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Uniform(Codec):
    """One side of uniform quantisation.

    bits: 1 to 8.
    axis: "token" or "channel".
    group: elements per range (channels or tokens).
    scales: dtype of scale and minimum, fp16 or bf16.
    """

    encodes_halves: ClassVar[bool] = True

    bits: int = 4
    axis: Literal["token", "channel"] = "token"
    group: int = 32
    scales: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        check_range("bits", self.bits, 1, 8)
        check_choices(self)
        check_range("group", self.group, 0, 1024)

    @property
    def fits_on(self) -> FitsOn | None:
        """Data that `fit` needs: "prompt" if one range per channel covers the whole sequence."""
        return "prompt" if self._whole else None

    def at_rate(self, bits: float) -> Self:
        """Return the codec with other bits. One range for the whole sequence is fitted for one rate."""
        if self._whole:
            raise UserError("axis=channel,group=0 fits its ranges for one rate; give a group of 1 or more tokens")
        return dataclasses.replace(self, bits=whole_bits(bits))

    @property
    def _whole(self) -> bool:
        return self.axis == "channel" and self.group == 0

    def grid(self, head_dim: int) -> Grid:
        """Return the memory layout."""
        dtype = SCALE_DTYPES[self.scales]
        return Grid(self.bits, self.side, self.axis, self.group, True, head_dim, dtype)

    def layout(self, head_dim: int) -> Layout:
        """Return the packed tensors: codes, scale and offset."""
        return self.grid(head_dim).layout()

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """Return the specifications of the ranges of the whole sequence."""
        dtype = SCALE_DTYPES[self.scales]
        scale, offset = TensorSpec(dtype, (B, H, head_dim), low=0), TensorSpec(dtype, (B, H, head_dim))
        return {"scale": scale, "offset": offset} if self._whole else {}

    def fit(self, x: Tensor) -> Self:
        """Fit each channel's range on x [B, H, T, D] if one range is used for the whole
        sequence.
        """
        if not self._whole:
            return self
        scale, offset = self._stored(x.amin(2), x.amax(2))
        return dataclasses.replace(self, fitted={"scale": scale, "offset": offset})

    def _stored(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and minimum in their stored dtype."""
        dtype = SCALE_DTYPES[self.scales]
        scale = round_scale((high - low) / (2**self.bits - 1), dtype, "a scale")
        return scale, round_scale(low, dtype, "a minimum")

    def encode(self, x: Tensor) -> PackedTensors:
        """Encode x [B, H, N·t, D] of any float dtype as packed tensors."""
        grid = self.grid(x.shape[-1])
        if self._whole:
            scale, offset = (self.fitted[name][:, :, None, None] for name in ("scale", "offset"))
        else:
            scale, offset = self._stored(*backends.group_ranges(x, grid.place))
        return grid.encode(x, None, scale, offset, whole=self._whole)

    def view(self, planes: PackedTensors, head_dim: int) -> GridView:
        """Return the view of codes with the codebook 0 … 2^b − 1."""
        table = integers(self.bits, str(planes["codes"].device))
        whole = self.fitted.get("scale"), self.fitted.get("offset")
        return GridView(self.grid(head_dim), planes, table, *whole, integers=True)

    def table_bytes(self, head_dim: int) -> TableBytes:
        """Return the bytes of the integers as floats, and of fitted ranges."""
        return TableBytes({f"integers {self.bits}": 4 * 2**self.bits}, per_head=4 * head_dim if self._whole else 0)

    def tables(self, head_dim: int) -> list[Tensor]:
        """Return the tensors counted by `table_bytes`."""
        return [integers(self.bits, "cpu"), *self.fitted.values()]


METHOD = Method(
    "uniform integers",
    "arXiv 2303.06865 (group 64), 2310.19102 (group 128)",
    for_both_sides(Uniform),
    variants=({"axis": "channel", "group": 0}, {"bits": 3, "axis": "channel", "group": 64, "scales": "bf16"}),
)
