"""Format `sparse`: a few elements of a block apart, added to what its dense codes decode to (KVQuant's
dense-and-sparse, arXiv 2401.18079, §3.4).

For a block of t = 32 tokens of one head with n outliers:

    outlier_places  ragged, n × 16 bits   [ token in block : 5 ][ channel : 11 ], ascending: by token, then by channel
    outlier_values  ragged, n × float16   x minus what the dense codes decode to
    outlier_starts  int32, one per block  where the block's entries begin, counted from its buffer's first entry

Token-major entries are columns of the key matrix and rows of the value matrix (CSC and CSR): a new block's entries
stand behind all earlier ones, and its own numbers say where, so an append touches nothing that is there. Counts vary
freely from token to token. Entries lie in the order block, batch row, head.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.encode_sparse import CHANNEL_BITS, MAX_CHANNELS
from tersekv.kernels.encode_sparse import quantiles as quantiles
from tersekv.layouts.base import BLOCK_TOKENS, PackedTensors, PlaneSpec, View


def sparse_planes(expected_per_token: float, head_dim: int) -> dict[str, PlaneSpec]:
    """Packed tensors of the outliers. expected_per_token: outliers per token and head assumed in a declared size."""
    entries = expected_per_token * BLOCK_TOKENS
    return {
        "outlier_starts": PlaneSpec((), torch.int32, "scales and norms"),
        "outlier_places": PlaneSpec(
            (), torch.int16, "codes", ragged=entries, channels=head_dim, channel_bits=CHANNEL_BITS
        ),
        "outlier_values": PlaneSpec((), torch.float16, "codes", ragged=entries),
    }


def pack_outliers(residual: Tensor, chosen: Tensor) -> PackedTensors:
    """Entries for residual float32 [B, H, T, D] (x minus its dense decoding) where `chosen` (bool) is set."""
    entries = backends.pack_outliers(residual, chosen)
    return {f"outlier_{name}": plane for name, plane in entries._asdict().items()}


def largest(excess: Tensor, chosen: Tensor, most: int) -> Tensor:
    """Of the `chosen` elements (bool [..., D]) the `most` with the largest excess, along the last axis."""
    most = min(most, excess.shape[-1])
    kept = torch.where(chosen, excess, -torch.inf).topk(most, dim=-1)
    mask = torch.zeros_like(chosen).scatter(-1, kept.indices, True)
    return mask & chosen


class SparseView(View):
    """The overlay of a segment: zeros but for its entries. planes: `outlier_starts` [B, H, N], counted from anywhere,
    and the entries of these blocks; `head_dim`: D."""

    format = kind = "sparse"

    def __init__(self, planes: PackedTensors, head_dim: int) -> None:
        self.starts, self.head_dim = planes["outlier_starts"], head_dim
        self.places, self.values = planes["outlier_places"], planes["outlier_values"]

    def native(self, native: ModuleType) -> Any:
        """See `View`."""
        return native.sparse(head_dim=self.head_dim, starts=self.starts, places=self.places, values=self.values)

    def decode(self) -> Tensor:
        """float32 [B, H, T, D]."""
        B, H, N = self.starts.shape
        order = self.starts.permute(2, 0, 1).flatten().long()  # of blocks, as entries lie
        ends = torch.cat([order[1:], order[:1] + len(self.places)])
        block = torch.repeat_interleave(torch.arange(N * B * H, device=order.device), ends - order)
        place = self.places.long() & 0xFFFF
        dense = torch.zeros(N * B * H, BLOCK_TOKENS, self.head_dim, device=order.device)
        dense[block, place >> CHANNEL_BITS, place & (MAX_CHANNELS - 1)] = self.values.float()
        return dense.view(N, B, H, BLOCK_TOKENS, self.head_dim).permute(1, 2, 0, 3, 4).flatten(2, 3)
