"""Samples of a stream by weight, each independent of the others (SubGen, arXiv 2402.06082, Algorithm 1).

Token by token, each of s slots is replaced with probability w/(μ + w), where w is the token's weight and μ that of all
before it; then a slot holds token i with probability w_i/Σw. Of a block with weight W, a slot ends with one of its
tokens with probability W/(μ + W), and with token i of them in proportion to w_i: the same, drawn at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.schema import Check, record, require, tensor


class Reservoir(NamedTuple):
    """slots int32 [B, H, s]: positions, sorted, −1 where nothing has come yet. weight float64 [B, H]: μ."""

    slots: Tensor
    weight: Tensor

    @staticmethod
    def empty(B: int, H: int, s: int, device: torch.device) -> Reservoir:
        """Nothing seen."""
        slots = torch.full((B, H, s), -1, dtype=torch.int32, device=device)
        return Reservoir(slots, torch.zeros(B, H, dtype=torch.float64, device=device))

    @staticmethod
    def schema(B: int, H: int) -> Check:
        """What a file may say of one, see `cache/schema.py`."""
        slots, weight = tensor(torch.int32, B, H, None, low=-1), tensor(torch.float64, B, H, low=0)
        return record({"slots": slots, "weight": weight})

    def check(self, below: int, place: str) -> None:
        """Raise UserError unless slots name positions below a number, in order, at least one."""
        ordered = self.slots.shape[2] > 0 and bool((self.slots.diff(dim=-1) >= 0).all())
        require(ordered and int(self.slots.max()) < below, f"{place}.slots", f"must rise, and be below {below}")

    def extended(self, weights: Tensor, positions: Tensor, generator: torch.Generator) -> Reservoir:
        """After a block: weights float64 [B, H, n] (0: never sampled), positions int32 [B, H, n]."""
        cumulated = weights.cumsum(-1)
        added = cumulated[..., -1:]
        total = self.weight.unsqueeze(-1) + added
        chance = torch.where(total > 0, added / total, 0.0)
        u, v = torch.rand((2, *self.slots.shape), dtype=torch.float64, generator=generator).to(weights.device)
        index = torch.searchsorted(cumulated, v * added, right=True).clamp(max=weights.shape[-1] - 1)
        slots = torch.where(u < chance, positions.gather(-1, index), self.slots)
        return Reservoir(slots.sort(dim=-1).values, total.squeeze(-1))


def counts(positions: Tensor, slots: Tensor) -> Tensor:
    """How many of slots [B, H, s] (sorted) name each of positions [B, H, n], both int32."""
    positions = positions.contiguous()
    return torch.searchsorted(slots, positions, right=True) - torch.searchsorted(slots, positions)
