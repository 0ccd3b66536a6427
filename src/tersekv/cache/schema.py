"""What a state may hold, as data: one check for each of its values, which runs before anything is made of it.

A check takes a value and its place in the state, and raises a `UserError` that begins with the place.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.tensors import TensorSpec

Check = Callable[[Any, str], None]

MOST = 2**31 - 1
"""Largest count of tokens or blocks: positions are int32."""


def refuse(place: str, why: str) -> NoReturn:
    """Raise UserError for what stands at a place of a state."""
    raise UserError(f"{place} {why}")


def require(holds: bool, place: str, why: str) -> None:
    """Raise UserError unless `holds`."""
    if not holds:
        refuse(place, why)


def whole(low: int = 0, high: int = MOST) -> Check:
    """A whole number from low to high."""

    def check(value: Any, place: str) -> None:
        if type(value) is not int or not low <= value <= high:
            refuse(place, f"is {shortened(value)}, and must be a whole number from {low} to {high}")

    return check


def flag(value: Any, place: str) -> None:
    """True or false."""
    if type(value) is not bool:
        refuse(place, f"is {shortened(value)}, and must be true or false")


def text(value: Any, place: str) -> None:
    """A string."""
    if not isinstance(value, str):
        refuse(place, f"is {shortened(value)}, and must be a text")


def number(value: Any, place: str) -> None:
    """A finite number ≥ 0."""
    fits = type(value) in (int, float) and 0 <= value < float("inf")
    if not fits:
        refuse(place, f"is {shortened(value)}, and must be a number from 0 on")


def one_of(*allowed: Any) -> Check:
    """One of these values."""

    def check(value: Any, place: str) -> None:
        fits = any(type(value) is type(one) and value == one for one in allowed)
        if not fits:
            refuse(place, f"is {shortened(value)}, and must be {' or '.join(map(str, allowed))}")

    return check


def tensor(
    dtype: torch.dtype, *shape: int | tuple[int, ...] | None, low: float | None = None, high: float | None = None
) -> Check:
    """A tensor, see `TensorSpec`."""
    return of_spec(TensorSpec(dtype, shape, low, high))


def of_spec(spec: TensorSpec) -> Check:
    """A tensor of this specification."""

    def check(value: Any, place: str) -> None:
        if fault := spec.fault(value):
            refuse(place, fault)

    return check


def per_row(store: Any) -> Check:
    """A whole number ≥ 0 for each row of a store's batch."""
    return tensor(torch.int64, store.batch_size, low=0, high=MOST)


def optional(wanted: Check) -> Check:
    """Nothing, or what `wanted` allows."""
    return lambda value, place: None if value is None else wanted(value, place)


def record(wanted: Mapping[str, Check], open_ended: bool = False, may_lack: bool = False) -> Check:
    """A dictionary with these entries. open_ended: others may be there; may_lack: any may be missing."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            refuse(place, f"is {shortened(value)}, and must have entries by name")
        if not may_lack and (missing := wanted.keys() - value.keys()):
            refuse(place, f"lacks {', '.join(sorted(missing))}")
        if not open_ended and (unknown := value.keys() - wanted.keys()):
            refuse(place, f"has unknown entries ({shortened(', '.join(sorted(unknown)))})")
        for name in wanted.keys() & value.keys():
            wanted[name](value[name], f"{place}.{name}" if place else name)

    return check


def each(wanted: Check, count: int | None = None) -> Check:
    """A list, of `count` entries where that is given."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            refuse(place, f"is {shortened(value)}, and must be a list")
        if count is not None and len(value) != count:
            refuse(place, f"has {len(value)} entries, and must have {count}")
        for i, entry in enumerate(value):
            wanted(entry, f"{place}.{i}")

    return check


def anything(value: Any, place: str) -> None:
    """What is checked elsewhere."""


def positions(places: Tensor, below: int, place: str) -> None:
    """Positions [B, H, n] of held tokens, −1 for none: each below a number, and none twice in a head."""
    if fault := TensorSpec(torch.int32, (None, None, None), -1, below - 1).fault(places):
        refuse(place, fault)
    ordered = places.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    require(not bool(twice.any()), place, "names a position twice in one head")


def shortened(value: Any) -> str:
    """A value as an error shows it."""
    if isinstance(value, (Tensor, dict, list)):
        return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    return reprlib.repr(value)
