"""Positions of a page's tokens as bits of a mask, so that they take one bit each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.tensors import last_contiguous

BITS = 8
"""Positions per byte of a mask."""


class Marks(NamedTuple):
    """Positions of `tokens` tokens of each head, in ascending order.

    The tokens of a head at positions whose bits equal `value` are numbered in order of position. The
    page has those from number `skip` on.

    bits: uint8 [B, H, n / 8]. Bit i % 8 of byte i // 8 is that of position first + i.
    """

    bits: Tensor
    first: int
    tokens: int
    value: bool = True
    skip: int = 0

    def part(self, first: int, tokens: int) -> Marks:
        """Return those of `tokens` tokens from the page's token `first` on."""
        return self._replace(tokens=tokens, skip=self.skip + first)

    @property
    def native(self) -> tuple[Tensor, bool, int]:
        """The marks as an argument of the C++ extension."""
        return last_contiguous(self.bits), self.value, self.skip

    def positions(self) -> Tensor:
        """Return the positions, int32 [B, H, tokens]."""
        places = places_of(unpack_bits(self.bits) == self.value)
        return places[:, :, self.skip : self.skip + self.tokens].to(torch.int32) + self.first


def places_of(mask: Tensor) -> Tensor:
    """Return the indices int64 [B, H, n] of a mask [B, H, T] with n in every head, ascending."""
    B, H, T = mask.shape
    places = mask.flatten().nonzero().view(B, H, -1)  # far faster than the indices of three axes
    return places - torch.arange(0, B * H * T, T, device=mask.device).view(B, H, 1)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack bool [B, H, T], T a multiple of 8, to bits: uint8 [B, H, T / 8]."""
    if mask.is_meta:  # shapes only
        return torch.empty((*mask.shape[:2], mask.shape[2] // BITS), dtype=torch.uint8, device="meta")
    weights = (1 << torch.arange(BITS, device=mask.device)).to(torch.uint8)
    return (mask.unflatten(2, (-1, BITS)) * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor) -> Tensor:
    """Return bits uint8 [B, H, n] as bool [B, H, 8·n]."""
    shifts = torch.arange(BITS, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) >> shifts & 1).flatten(2).bool()
