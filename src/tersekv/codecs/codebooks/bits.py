"""Bit allocation by reverse water-filling (Cover & Thomas, §10.3), in whole bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tersekv.kernels import components
from tersekv.kernels.trellis_search import MOST_BITS
from tersekv.tensors import cached_table

SQUARED_ERROR = {
    "trellis": (1.0, 0.288, 0.0771, 0.0207, 0.00572, 0.00175, 0.00064, 0.000193, 0.000095),
    "scalar": (1.0, 0.3634, 0.1175, 0.03455, 0.009501, 0.002505, 0.000644, 0.000163, 0.0000412),
}
"""Squared error ε(b) of N(0, 1) at 0 to 8 bits; trellis: circular streams of 64 components."""


def allotted(variance: Tensor, total: int, error: tuple[float, ...]) -> Tensor:
    """Allocate bits uint8 [..., D] with Σ = total per row, minimising Σ variance·error[bits]."""
    return components.allotted(variance, total, falls(error))


@cached_table
def searched_error(code: str) -> Tensor:
    """Return the squared error at 0 to 8 bits, float32 [9]: 0 without bits, where nothing is searched."""
    return torch.tensor((0.0, *SQUARED_ERROR[code][1:]))


@cached_table
def falls(error: tuple[float, ...]) -> Tensor:
    """Return by how much each further bit reduces an error, float64 [8]."""
    return torch.tensor([error[b] - error[b + 1] for b in range(MOST_BITS)], dtype=torch.float64)


def shared_out(losses: Sequence[Tensor], words: int, word_bits: int, error: tuple[float, ...]) -> list[int]:
    """Allocate `words` words of `word_bits` to layers and sides. Return the words per head of each.

    Water-filling runs over the components of all of them, with losses [1, H, D]. First, losses are
    divided by the square root of their geometric mean, which halves differences on a logarithmic
    scale. Unscaled losses predict only small errors well, and few bits make large ones.
    """
    drawn = [loss / loss.clamp_min(1e-30).log().mean().exp().sqrt() for loss in losses]
    wanted = allotted(torch.cat([loss.flatten() for loss in drawn]), words * word_bits, error).long()
    heads = torch.tensor([loss.shape[1] for loss in losses])
    bits = torch.stack([part.sum() for part in wanted.split([loss.numel() for loss in losses])])
    most = torch.tensor([MOST_BITS * loss.shape[-1] // word_bits for loss in losses])
    return torch.minimum(_whole(bits / word_bits / heads, heads, words), most).tolist()


def _whole(wanted: Tensor, heads: Tensor, total: int) -> Tensor:
    """Round `wanted` [n] to whole words, at least one each, at most `total` in all heads."""
    words = wanted.floor().clamp_min(1).long()
    for i in (wanted - words).argsort(descending=True, stable=True).tolist():
        if int((words * heads).sum()) + int(heads[i]) <= total:
            words[i] += 1
    return words
