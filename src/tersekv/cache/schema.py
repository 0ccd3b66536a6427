"""Checks for the values of a state that was read from a file. They run before any value is used.

A check takes a value and its path in the state. It raises a `UserError` that begins with the path.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.tensors import TensorSpec

Check = Callable[[Any, str], None]

MOST = 2**31 - 1
"""Maximum number of tokens or blocks, because positions are int32."""

MOST_NUMBER = 1e200
"""Maximum of other numbers, so that products of them are finite."""


def refuse(place: str, why: str) -> NoReturn:
    """Raise UserError about the value at a path of a state."""
    raise UserError(f"{place} {why}")


def require(holds: bool, place: str, why: str) -> None:
    """Raise UserError unless `holds`."""
    if not holds:
        refuse(place, why)


def whole(low: int = 0, high: int = MOST) -> Check:
    """Return a check for a whole number from low to high."""

    def check(value: Any, place: str) -> None:
        if type(value) is not int or not low <= value <= high:
            refuse(place, f"is {shortened(value)}, and must be a whole number from {low} to {high}")

    return check


def flag(value: Any, place: str) -> None:
    """Check for true or false."""
    if type(value) is not bool:
        refuse(place, f"is {shortened(value)}, and must be true or false")


def text(value: Any, place: str) -> None:
    """Check for a string."""
    if not isinstance(value, str):
        refuse(place, f"is {shortened(value)}, and must be a string")


def number(value: Any, place: str) -> None:
    """Check for a finite number ≥ 0."""
    fits = type(value) in (int, float) and 0 <= value <= MOST_NUMBER
    if not fits:
        refuse(place, f"is {shortened(value)}, and must be a finite number of at least 0")


def one_of(*allowed: Any) -> Check:
    """Return a check for one of these values."""

    def check(value: Any, place: str) -> None:
        fits = any(type(value) is type(one) and value == one for one in allowed)
        if not fits:
            refuse(place, f"is {shortened(value)}, and must be {' or '.join(map(str, allowed))}")

    return check


def tensor(
    dtype: torch.dtype, *shape: int | tuple[int, ...] | None, low: float | None = None, high: float | None = None
) -> Check:
    """Return a check for a tensor, see `TensorSpec`."""
    return of_spec(TensorSpec(dtype, shape, low, high))


def of_spec(spec: TensorSpec) -> Check:
    """Return a check for a tensor with this specification."""

    def check(value: Any, place: str) -> None:
        if fault := spec.fault(value):
            refuse(place, fault)

    return check


def per_row(store: Any) -> Check:
    """Return a check for one whole number ≥ 0 per batch row of a store."""
    return tensor(torch.int64, store.batch_size, low=0, high=MOST)


def optional(wanted: Check) -> Check:
    """Return a check that allows None and all that `wanted` allows."""
    return lambda value, place: None if value is None else wanted(value, place)


def record(wanted: Mapping[str, Check], open_ended: bool = False, may_lack: bool = False) -> Check:
    """Return a check for a dictionary with these entries.

    open_ended: other entries are allowed.
    may_lack: any entry may be missing.
    """

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            refuse(place, f"is {shortened(value)}, and must be a dictionary")
        if not may_lack and (missing := wanted.keys() - value.keys()):
            names = ", ".join(sorted(missing))
            refuse(place, f"lacks {names if len(names) < 200 else names[:200] + ' …'}")
        if not open_ended and (unknown := value.keys() - wanted.keys()):
            refuse(place, f"has unknown entries ({shortened(', '.join(sorted(unknown)))})")
        for name in wanted.keys() & value.keys():
            wanted[name](value[name], f"{place}.{name}" if place else name)

    return check


def each(wanted: Check, count: int | None = None) -> Check:
    """Return a check for a list, of `count` entries if given."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            refuse(place, f"is {shortened(value)}, and must be a list")
        if count is not None and len(value) != count:
            refuse(place, f"has {len(value)} entries, and must have {count}")
        for i, entry in enumerate(value):
            wanted(entry, f"{place}.{i}")

    return check


def listed(wanted: Sequence[Check]) -> Check:
    """Return a check for a list with one entry for each of the checks."""

    def check(value: Any, place: str) -> None:
        each(anything, len(wanted))(value, place)
        for i, (entry, one) in enumerate(zip(value, wanted, strict=True)):
            one(entry, f"{place}.{i}")

    return check


def anything(value: Any, place: str) -> None:
    """Accept any value, because it is checked elsewhere."""


def positions(places: Tensor, below: int, place: str) -> None:
    """Check positions [B, H, n] of held tokens, −1 for none: each below `below` and unique in its
    head.
    """
    if fault := TensorSpec(torch.int32, (None, None, None), -1, below - 1).fault(places):
        refuse(place, fault)
    ordered = places.sort(dim=-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    require(not bool(twice.any()), place, "has a position twice in one head")


def shortened(value: Any) -> str:
    """Describe a value briefly for an error message."""
    if isinstance(value, (Tensor, dict, list)):
        return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    return reprlib.repr(value)
