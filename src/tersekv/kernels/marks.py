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

    The tokens of a head at positions whose bits equal `value` are numbered in order of position. Token t
    of the page is number skip + t.

    bits: uint8 [B, H, n / 8]. Bit i % 8 of byte i // 8 is that of position first + i.
    value: the same for all heads, or bool [H]. skip: the same for all heads, or int64 [B, H].
    ends: see `PackedPages`. Then token t of all tokens of the page is number skip + t of its head.
    """

    bits: Tensor
    first: int
    tokens: int
    value: bool | Tensor = True
    skip: int | Tensor = 0
    ends: Tensor | None = None

    def part(self, first: int, tokens: int) -> Marks:
        """Return those of `tokens` tokens from the page's token `first` on."""
        return self._replace(tokens=tokens, skip=self.skip + first)

    @property
    def native(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The marks as an argument of the C++ extension."""
        skip = torch.as_tensor(self.skip).expand(self.bits.shape[:2])
        value = torch.as_tensor(self.value).expand(skip.shape)
        return last_contiguous(self.bits), torch.stack([value.long(), skip], dim=-1), self.ends

    @property
    def head(self) -> Tensor:
        """Number of the head that each token belongs to, counted over the batch rows, int64 [tokens]; with `ends`."""
        assert self.ends is not None
        return heads_of(self.ends, self.bits, self.tokens)

    def positions(self) -> Tensor:
        """Return the positions, int32 [B, H, tokens]; with `ends` [1, 1, tokens]."""
        B, H, _ = self.bits.shape
        value = torch.as_tensor(self.value, device=self.bits.device).expand(H)
        mask = unpack_bits(self.bits) == value[:, None]
        skip = torch.as_tensor(self.skip, device=mask.device).expand(B, H)
        number = torch.arange(self.tokens, device=mask.device)
        if self.ends is None:
            head = torch.arange(B * H, device=mask.device).repeat_interleave(self.tokens)
            shape, number = (B, H, self.tokens), number.repeat(B * H)
        else:
            head, shape = self.head, (1, 1, self.tokens)
        places = places_of(mask.flatten(0, 1), head, number + skip.flatten()[head])
        return places.view(shape).to(torch.int32) + self.first


def heads_of(ends: Tensor, like: Tensor, tokens: int | None = None) -> Tensor:
    """Return the head of each token of a page with these `ends`, as `Marks.head`, on the device of another tensor."""
    counts = ends.flatten().diff(prepend=ends.new_zeros(1)).to(like.device)
    heads = torch.arange(len(counts), device=like.device)
    return torch.repeat_interleave(heads, counts, output_size=len(like) if tokens is None else tokens)


def places_of(mask: Tensor, head: Tensor, numbers: Tensor) -> Tensor:
    """Return the indices int64 [n] of places of a mask [heads, T].

    head, numbers: int64 [n], the places by the number of their head, and their number in the order of its places.
        One that a head does not have gives any index.
    """
    T, places = mask.shape[1], mask.flatten().nonzero().flatten()  # far faster than the indices of two axes
    counts = mask.sum(-1)
    index = (counts.cumsum(0) - counts)[head] + numbers
    return torch.nn.functional.pad(places, (0, 1))[index.clamp_(max=len(places))] - head * T


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
