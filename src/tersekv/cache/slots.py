"""Positions of tokens of which each KV head of a layer holds its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tersekv.cache.footprint import Footprint
from tersekv.cache.pages import GROWTH, MIN_PAGE_TOKENS
from tersekv.cache.schema import Check, each, of_spec, record, require, tensor
from tersekv.cache.state import Rules, State, Stateful, own
from tersekv.tensors import TensorSpec

POSITIONS = "positions"


def same_slots(slots: Slots, place: str) -> None:
    """Check that fields have the slots of the positions, and numbers where a slot holds a token."""
    if not slots.held:
        return
    alive = slots.held[POSITIONS] >= 0
    for name, x in slots.held.items():
        where, n, wanted = f"{place}.fields.{name}", x.shape[-1], alive.shape[-1]
        require(n == wanted, where, f"has {n} slots of {wanted}")
        require(bool(x[alive].isfinite().all()), where, "has a NaN or Inf where a slot holds a token")


class Slots(Stateful):
    """Positions of tokens, and further numbers.

    like: tensor [B, H, ·, ·]. An empty slot has position −1 and is never attended to.
    fields: dtypes of the further numbers by name; None if positions are known without this object, which then
        holds `counts` only.
    unit: slots of a block if each head has its own number of blocks, else 0.
    held: positions int32 and fields by name. [B, H, n]; with a unit [N], page after page and within a page
        one head after the other, so that no head has empty blocks.
    counts: with a unit, the number of blocks of each head in each page, int64 [B, H], on the CPU.

    With a unit, all that is given and returned as [B, H, n] has as many slots of a page in every head as the head with
    the most blocks in it; the others have empty ones at the end.
    """

    RULES: ClassVar[Rules] = (same_slots,)
    HELD: ClassVar[tuple[str, ...]] = ("held", "counts")

    def __init__(self, like: Tensor, fields: Mapping[str, torch.dtype] | None, unit: int = 0) -> None:
        self.heads, self.unit, self.device = (len(like), like.shape[1]), unit, like.device
        shape = (0,) if unit else (*self.heads, 0)
        kinds = {} if fields is None else {POSITIONS: torch.int32, **fields}
        self.held = {name: like.new_empty(shape, dtype=kind) for name, kind in kinds.items()}
        self.counts: Sequence[Tensor] = []

    def __len__(self) -> int:
        if not self.unit:
            return self.held[POSITIONS].shape[2]
        return sum(int(count.max()) for count in self.counts) * self.unit

    @property
    def positions(self) -> Tensor:
        """Positions int32 [B, H, n]."""
        return self._padded(POSITIONS)

    @property
    def fields(self) -> dict[str, Tensor]:
        """Further numbers [B, H, n] by name, of any value in empty slots."""
        return {name: self._padded(name) for name in self.held if name != POSITIONS}

    @property
    def alive(self) -> Tensor:
        """Mask of slots that hold a token, bool [B, H, n]."""
        return self.positions >= 0

    def _padded(self, name: str) -> Tensor:
        x = self.held[name]
        if not self.unit:
            return x
        index, there = self.index(unit=self.unit)
        return torch.where(there, x[index], -1) if name == POSITIONS else x[index]

    def _flat(self, x: Tensor) -> Tensor:
        """Invert `_padded`."""
        if not self.unit:
            return x
        index, there = self.index(unit=self.unit)
        return x.new_empty(int(there.sum())).index_put_((index[there],), x[there])

    # ------------------------------------------------------------------ slots that all heads have

    def add(self, new: Mapping[str, Tensor]) -> None:
        """Append slots: positions [B, H, n], and the fields of this object."""
        self.held = {name: torch.cat([old, new[name].to(old.dtype)], dim=2) for name, old in self.held.items()}

    def gather(self, index: Tensor) -> None:
        """Keep the slots `index` [B, H, n] of each head, in that order."""
        self.held = {name: x.gather(2, index) for name, x in self.held.items()}

    # ------------------------------------------------------------------ any slots

    def note(self, **fields: Tensor) -> None:
        """Set fields [B, H, n]."""
        self.held = self.held | {name: self._flat(x) for name, x in fields.items()}

    def forget(self, name: str) -> None:
        """Remove a field."""
        self.held = {own: x for own, x in self.held.items() if own != name}

    def keep(self, alive: Tensor) -> None:
        """Empty all slots except those in the mask `alive` [B, H, n]."""
        self.held = self.held | {POSITIONS: self._flat(self.positions.masked_fill(~alive, -1))}

    def resize(self, n: int) -> None:
        """Have n slots, in all if there is a unit, without content."""
        self.held = {name: x.new_empty((*x.shape[:-1], n)) for name, x in self.held.items()}

    # ------------------------------------------------------------------ blocks of which each head has its own number

    def index(self, first: int = 0, unit: int = 1) -> tuple[Tensor, Tensor]:
        """Return where blocks are, int64 [B, H, n], and the mask of those that there are.

        first: number of the first page. Blocks are counted from its first one.
        unit: parts of a block that are counted.
        """
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        index, there, start = [], [], 0
        for count in self.counts[first:]:
            held = torch.arange(int(count.max()) * unit, device=device) < count.to(device).unsqueeze(-1) * unit
            index.append((held.flatten().cumsum(0) - 1).clamp(min=0).view_as(held) + start)
            there.append(held)
            start += int(count.sum()) * unit
        if not index:
            index = [torch.zeros((*self.heads, 0), dtype=torch.int64, device=device)]
            there = [index[0] > 0]
        return torch.cat(index, dim=2), torch.cat(there, dim=2)

    def small_pages(self, blocks: int) -> int:
        """Return the number of the first of the latest pages that are so small that they join `blocks` new ones."""
        sizes = [int(count.sum()) for count in self.counts]
        B, H = self.heads
        most, first = max((sum(sizes) + blocks) // GROWTH, B * H * max(1, MIN_PAGE_TOKENS // self.unit)), len(sizes)
        while first and sizes[first - 1] <= most:
            first -= 1
        return first

    def replace(self, first: int, kept: Tensor, new: Mapping[str, Tensor] | None = None) -> None:
        """Make one page of the pages from `first` on and of new slots, see `PackedSide.replace`.

        new: positions and fields [B, H, m·unit].
        """
        if self.held:
            before = sum(int(count.sum()) for count in self.counts[:first]) * self.unit
            index, _ = self.index(first, self.unit)
            slots = kept.repeat_interleave(self.unit, dim=2)
        for name, x in self.held.items():
            padded = x[before:][index]
            padded = padded if new is None else torch.cat([padded, new[name].to(x.dtype)], dim=2)
            self.held = self.held | {name: torch.cat([x[:before], padded[slots]])}
        self.counts = [*self.counts[:first], *([kept.sum(-1).cpu()] if bool(kept.any()) else [])]

    # ------------------------------------------------------------------ state

    def live_state(self) -> State:
        fields = dict(self.held)
        state: State = {POSITIONS: fields.pop(POSITIONS), "fields": fields} if fields else {}
        return state | ({"counts": list(self.counts)} if self.unit else {})

    def schema(self) -> dict[str, Check]:
        shape = (None,) if self.unit else (*self.heads, None)
        fields = {
            name: of_spec(TensorSpec(x.dtype, shape, anything=True))
            for name, x in self.held.items()
            if name != POSITIONS
        }
        counts = {"counts": each(tensor(torch.int64, *self.heads, low=0))} if self.unit else {}
        held = {POSITIONS: tensor(torch.int32, *shape), "fields": record(fields)} if self.held else {}
        return held | counts

    def _hold(self, state: State, place: str) -> None:
        if self.held:
            self.held = own({POSITIONS: state[POSITIONS], **state["fields"]})
        self.counts = own([count.cpu() for count in state.get("counts", [])])

    def select(self, rows: Tensor) -> None:
        """Keep these batch rows (int64, repeats allowed)."""
        self.heads = len(rows), self.heads[1]
        if not self.unit:
            super().select(rows)
            return
        index, there = self.index(unit=self.unit)
        self.held = {name: x[index[rows][there[rows]]] for name, x in self.held.items()}
        counts = torch.stack([*self.counts]).sum(0)[rows.cpu()] if self.counts else torch.zeros(0)
        self.counts = [counts] if bool(counts.any()) else []  # a page holds a block or more

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device, except `counts`."""
        counts = self.counts
        super().to(device)
        self.counts, self.device = counts, torch.device(device)

    def count(self, footprint: Footprint) -> None:
        """Add the bytes held to `footprint`."""
        footprint.parts["selection"] += sum(x.nbytes for x in self.held.values())


def in_front(mask: Tensor, n: int | None = None) -> Tensor:
    """Return the indices [B, H, n] of the first n slots in a mask [B, H, T], then those of others.

    n: the most that a head has in the mask, if not given.
    """
    return (~mask).int().argsort(dim=-1, stable=True)[:, :, : int(mask.sum(-1).max()) if n is None else n]


def in_turn(mask: Tensor) -> Tensor:
    """Return indices [B, H, T] of the slots in a mask [B, H, T], in turn until there are T. Without any: of all."""
    order, tokens = in_front(mask, mask.shape[2]), mask.sum(-1, keepdim=True)
    at = torch.arange(mask.shape[2], device=mask.device)
    return order.gather(2, at % torch.where(tokens > 0, tokens, mask.shape[2]).clamp(min=1))
