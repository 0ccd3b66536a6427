"""No quantisation: 16- or 32-bit floats, for exempted layers and as a baseline.

Good for: single layers that must not be coded, and as a baseline.
Bad for: saving memory: it saves none beside a bfloat16 model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, Method, check_choice, for_both_sides
from tersekv.layouts.base import Layout, PackedTensors
from tersekv.layouts.exact import DTYPES, ExactView, exact_layout
from tersekv.layouts.grid import round_scale


@dataclass(frozen=True)
class Exact(Codec):
    """Store unquantised floats.

    dtype: bf16, fp16 or fp32.
    """

    has_rates: ClassVar[bool] = False

    dtype: Literal["bf16", "fp16", "fp32"] = "fp16"

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(DTYPES))

    def layout(self, head_dim: int) -> Layout:
        """Return the layout with one tensor."""
        return exact_layout(head_dim, DTYPES[self.dtype])

    def encode(self, x: Tensor) -> PackedTensors:
        """Convert x float32 [B, H, N·t, D] to the dtype.

        Raises:
            UserError: a value is too large for it.
        """
        dtype = DTYPES[self.dtype]
        if x.is_cuda and torch.cuda.is_current_stream_capturing():  # a check would wait for the device
            stored = x.to(dtype)
        else:
            wider = "bf16" if self.dtype == "fp16" else "fp32"
            stored = round_scale(x, dtype, "a key or value", f"use the method's option dtype={wider}")
        return {"x": stored.unflatten(2, (-1, self.layout(x.shape[-1]).block_tokens))}

    def view(self, planes: PackedTensors, head_dim: int) -> ExactView:
        """Return the view of the floats."""
        return ExactView(planes)


METHOD = Method("uncompressed", "", for_both_sides(Exact))
