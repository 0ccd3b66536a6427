"""Layout `sparse`: outliers, which are added to the decoded dense codes.

This is KVQuant's dense-and-sparse format (arXiv 2401.18079, §3.4). A block of t = 32 tokens of one
head with n outliers has three tensors:

    outlier_places  ragged, n × 16 bits   [ token in block : 5 ][ channel : 11 ], ascending;
    outlier_values  ragged, n × float16   x minus the decoded dense codes;
    outlier_starts  int32, one per block  index of the block's first entry, counted from its buffer's start

Token-major entries are columns of the key matrix and rows of the value matrix (CSC and CSR). A new
block's entries follow all earlier ones, and their start is stored with the new block. An append
therefore changes no existing data. The number of outliers may vary from token to token. Entries are
in the order block, batch row, head.
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
    """Return the specifications of the outliers' packed tensors.

    expected_per_token: outliers per token and head that estimated sizes assume.
    """
    entries = expected_per_token * BLOCK_TOKENS
    return {
        "outlier_starts": PlaneSpec((), torch.int32, "scales and norms"),
        "outlier_places": PlaneSpec(
            (), torch.int16, "codes", ragged=entries, channels=head_dim, channel_bits=CHANNEL_BITS
        ),
        "outlier_values": PlaneSpec((), torch.float16, "codes", ragged=entries),
    }


def pack_outliers(residual: Tensor, chosen: Tensor) -> PackedTensors:
    """Return the packed entries of residual float32 [B, H, T, D] where `chosen` (bool) is True.

    The residual is x minus the decoded dense codes.
    """
    entries = backends.pack_outliers(residual, chosen)
    return {f"outlier_{name}": plane for name, plane in entries._asdict().items()}


def largest(excess: Tensor, chosen: Tensor, most: int) -> Tensor:
    """Return the mask of the `most` chosen elements with the largest excess along the last axis.

    chosen: bool [..., D].
    """
    most = min(most, excess.shape[-1])
    kept = torch.where(chosen, excess, -torch.inf).topk(most, dim=-1)
    mask = torch.zeros_like(chosen).scatter(-1, kept.indices, True)
    return mask & chosen


class SparseView(View):
    """Outliers of a segment as a tensor that is zero elsewhere.

    planes: `outlier_starts` [B, H, N], counted from any origin, and the entries of these blocks.
    head_dim: D.
    """

    format = kind = "sparse"

    def __init__(self, planes: PackedTensors, head_dim: int) -> None:
        self.starts, self.head_dim = planes["outlier_starts"], head_dim
        self.places, self.values = planes["outlier_places"], planes["outlier_values"]

    def native(self, native: ModuleType) -> Any:
        return native.sparse(head_dim=self.head_dim, starts=self.starts, places=self.places, values=self.values)

    def decode(self) -> Tensor:
        """Return the outliers as float32 [B, H, T, D], 0 elsewhere."""
        B, H, N = self.starts.shape
        order = self.starts.permute(2, 0, 1).flatten().long()  # blocks in the order of their entries
        ends = torch.cat([order[1:], order[:1] + len(self.places)])
        block = torch.repeat_interleave(torch.arange(N * B * H, device=order.device), ends - order)
        place = self.places.long() & 0xFFFF
        dense = torch.zeros(N * B * H, BLOCK_TOKENS, self.head_dim, device=order.device)
        dense[block, place >> CHANNEL_BITS, place & (MAX_CHANNELS - 1)] = self.values.float()
        return dense.view(N, B, H, BLOCK_TOKENS, self.head_dim).permute(1, 2, 0, 3, 4).flatten(2, 3)
