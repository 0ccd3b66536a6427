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

Blocks of one size, which the pages of an engine need, have room for n outliers each:

    outlier_places  n × 16 bits           as above;
    outlier_values  n × float16           as above.

Unused entries follow the others. Their place is the last one of the block and their value is 0, so
that adding them changes nothing.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.encode_sparse import CHANNEL_BITS, MAX_CHANNELS
from tersekv.kernels.encode_sparse import quantiles as quantiles
from tersekv.layouts.base import BLOCK_TOKENS, PackedTensors, PlaneSpec, View, whole_share


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


def sparse_block_planes(most: int, head_dim: int) -> dict[str, PlaneSpec]:
    """Return the specifications of the packed tensors with room for `most` outliers per block."""
    return {
        "outlier_places": PlaneSpec((most,), torch.int16, "codes", channels=head_dim, channel_bits=CHANNEL_BITS),
        "outlier_values": PlaneSpec((most,), torch.float16, "codes"),
    }


def pack_outlier_blocks(residual: Tensor, chosen: Tensor, most: int) -> PackedTensors:
    """Return the packed entries of blocks that have room for `most` outliers each.

    residual, chosen: as in `pack_outliers`, with at most that many chosen in each block.
    """
    D = residual.shape[-1]
    elements = BLOCK_TOKENS * D
    by_block = chosen.unflatten(2, (-1, BLOCK_TOKENS)).flatten(3)  # [B, H, N, 32·D]
    numbers = torch.where(by_block, torch.arange(elements, device=chosen.device), elements)
    first = numbers.topk(most, dim=-1, largest=False).values.sort(dim=-1).values
    used, element = first < elements, first.clamp_max(elements - 1)
    values = residual.unflatten(2, (-1, BLOCK_TOKENS)).flatten(3).gather(-1, element)
    places = element // D << CHANNEL_BITS | element % D
    return {
        # convert to int16 without changing the low 16 bits
        "outlier_places": (places - (places >> 15 << 16)).to(torch.int16),
        "outlier_values": torch.where(used, values, 0.0).to(torch.float16),
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


def largest_share(excess: Tensor, chosen: Tensor, share: float, per_head: bool) -> Tensor:
    """Keep the most extreme outliers of each token, in each head or over all, so that they are at most
    the share. Quantiles round up at both ends: 1 % of 128 values would be two of them.

    excess, chosen: [B, H, T, D], see `largest`.
    """
    if per_head:
        return largest(excess, chosen, whole_share(share, chosen.shape[-1]))
    excess, of_token = (x.transpose(1, 2).flatten(2) for x in (excess, chosen))
    kept = largest(excess, of_token, whole_share(share, of_token.shape[-1]))
    return kept.unflatten(2, (chosen.shape[1], -1)).transpose(1, 2)


def largest_of_blocks(excess: Tensor, chosen: Tensor, most: int) -> Tensor:
    """Return the mask of the `most` chosen elements with the largest excess in each block, of
    [B, H, N·32, D]."""
    excess_, chosen_ = (x.unflatten(2, (-1, BLOCK_TOKENS)).flatten(3) for x in (excess, chosen))
    return largest(excess_, chosen_, most).view(chosen.shape)


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


class SparseBlocksView(View):
    """Outliers of blocks with equally many entries, as a tensor that is zero elsewhere.

    planes: `outlier_places` and `outlier_values` [B, H, N, n]. head_dim: D.
    """

    format = kind = "sparse blocks"

    def __init__(self, planes: PackedTensors, head_dim: int) -> None:
        self.places, self.values, self.head_dim = planes["outlier_places"], planes["outlier_values"], head_dim

    def native(self, native: ModuleType) -> Any:
        return native.sparse_blocks(head_dim=self.head_dim, places=self.places, values=self.values)

    def decode(self) -> Tensor:
        """Return the outliers as float32 [B, H, T, D], 0 elsewhere. Places outside the head are left out."""
        place, D = self.places.long() & 0xFFFF, self.head_dim
        channel = place & (MAX_CHANNELS - 1)
        element = (place >> CHANNEL_BITS) * D + channel.clamp_max(D - 1)
        dense = torch.zeros(*place.shape[:3], BLOCK_TOKENS * D, device=place.device)
        dense.scatter_add_(-1, element, torch.where(channel < D, self.values.float(), 0.0))
        return dense.unflatten(-1, (BLOCK_TOKENS, D)).flatten(2, 3)
