"""Positions of tokens of which each KV head of a layer holds its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.schema import Check, of_spec, record, require, tensor
from tersekv.cache.state import Rules, Spec, Stateful
from tersekv.tensors import TensorSpec


def _fields(slots: Slots) -> Check:
    """Return the check of the fields. An empty slot may hold any number."""
    B, H, _ = slots.positions.shape
    return record({name: of_spec(TensorSpec(x.dtype, (B, H, None), anything=True)) for name, x in slots.fields.items()})


def same_slots(slots: Slots, place: str) -> None:
    """Check that fields have the slots of the positions, and numbers where a slot holds a token."""
    for name, x in slots.fields.items():
        where, n = f"{place}.fields.{name}", len(slots)
        require(x.shape[2] == n, where, f"has {x.shape[2]} slots of {n}")
        require(bool(x[slots.alive].isfinite().all()), where, "has a NaN or Inf where a slot holds a token")


class Slots(Stateful):
    """Positions of tokens, and further numbers. All heads have the same number of slots.

    like: tensor [B, H, ·, ·]. An empty slot has position −1 and is never attended to.
    positions: int32 [B, H, n].
    fields: [B, H, n] by name.
    """

    STATE: ClassVar[Spec] = {
        "positions": lambda slots: tensor(torch.int32, *slots.positions.shape[:2], None),
        "fields": _fields,
    }
    RULES: ClassVar[Rules] = (same_slots,)

    def __init__(self, like: Tensor, fields: Mapping[str, torch.dtype]) -> None:
        shape = (*like.shape[:2], 0)
        self.positions = like.new_empty(shape, dtype=torch.int32)
        self.fields = {name: like.new_empty(shape, dtype=kind) for name, kind in fields.items()}

    def __len__(self) -> int:
        return self.positions.shape[2]

    @property
    def alive(self) -> Tensor:
        """Mask of slots that hold a token, bool [B, H, n]."""
        return self.positions >= 0

    def add(self, positions: Tensor, fields: Mapping[str, Tensor]) -> None:
        """Append slots: positions [B, H, n], and the fields of this object."""
        self.positions = torch.cat([self.positions, positions.to(torch.int32)], dim=2)
        self.fields = {name: torch.cat([old, fields[name].to(old.dtype)], dim=2) for name, old in self.fields.items()}

    def note(self, **fields: Tensor) -> None:
        """Set fields [B, H, n]."""
        self.fields = self.fields | fields

    def forget(self, name: str) -> None:
        """Remove a field."""
        self.fields = {own: x for own, x in self.fields.items() if own != name}

    def keep(self, alive: Tensor) -> None:
        """Empty all slots except those in the mask `alive` [B, H, n]."""
        self.positions = self.positions.masked_fill(~alive, -1)

    def gather(self, index: Tensor) -> None:
        """Keep the slots `index` [B, H, n] of each head, in that order."""
        self.positions = self.positions.gather(2, index)
        self.fields = {name: x.gather(2, index) for name, x in self.fields.items()}

    def resize(self, n: int) -> None:
        """Have n slots, without content."""
        self._map(lambda x: x.new_empty((*x.shape[:2], n)))

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`."""
        footprint.parts["selection"] += sum(x.nbytes for x in (self.positions, *self.fields.values()))


def in_front(mask: Tensor, n: int | None = None) -> Tensor:
    """Return the indices [B, H, n] of the first n slots in a mask [B, H, T], then those of others.

    n: the most that a head has in the mask, if not given.
    """
    return (~mask).int().argsort(dim=-1, stable=True)[:, :, : int(mask.sum(-1).max()) if n is None else n]
