"""The search for trellis codes (`kernels/trellis.py`): its integer costs, the entries that it may take, and Viterbi.

Shapes: n vectors of D components, A of which have bits; R rows, whose vectors share bits and weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

STATES = 256
STATE_BITS = 8
MOST_BITS = 8
"""Most bits of a component."""

WARM_UP_BITS, LOOK_AHEAD_BITS = 48, 40
"""Least bits of the components before and after the place where paths begin and end.

The best open path over these components has the state of that place. The most bits come first
where a basis is fitted, so that few components are searched twice.
"""

LARGEST = 32767
"""Largest absolute value of table entries and components in integer costs."""

MOST_COST = 65535
"""Path costs saturate here."""

TYPICAL_COST = 3
"""Typical cost of a component. A larger one is more precise, and saturates earlier."""

MARGIN = 4096
"""Largest cost of a component beyond the end of its table. More would hide which entry is nearest."""

RENORMALISE = 16
"""Number of steps after which the least cost is subtracted from all costs."""

LEAST_NEAR = 3
"""Least bits of a component that takes near entries only, and of the component after it."""

BINS = 63
"""The scaled components between 0 and the end of a table are this many bins."""

LEAST_FACTOR = 2048
"""Least factor of components that take near entries only. Factors are about 10,000 where weights follow the bits.

With a small weight the error of a component hardly counts, but its bits are part of its neighbours' windows.
"""


def first_search(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return where paths around a ring of bits [..., D] begin, and where the open path ends, int64 [...].

    The open path runs over the components from 0 to its end. Those from D on are the first ones again.
    """
    D, width = bits.shape[-1], bits.long()
    brought = torch.cat((width, width), -1).cumsum(-1)  # after each component
    before = brought - torch.cat((width, width), -1)
    begin = (before[..., :D] < WARM_UP_BITS).sum(-1)
    warm = brought.gather(-1, (begin - 1).clamp_min(0).unsqueeze(-1)) * (begin > 0).unsqueeze(-1)
    return begin, torch.minimum((before < warm + LOOK_AHEAD_BITS).sum(-1), begin + D)


class CostUnits(NamedTuple):
    """Integer units of a search.

    entries: int16 [9, 256], tables scaled to `LARGEST`.
    factor: int16 [R, D]. A component's entries are multiplied with it, and divided by 2^15.
    unit: float32 [R, D], factor of the component y in the same units.
    limit: float32 [R, D], largest absolute value of the scaled component.
    """

    entries: Tensor
    factor: Tensor
    unit: Tensor
    limit: Tensor


def cost_units(weight: Tensor, bits: Tensor, tables: Tensor) -> CostUnits:
    """Return the units in which a component's cost is about `TYPICAL_COST`.

    The cost of a component is (2^s·(entry − y))² / 2^16, with s from `cost_shift`. A component's
    expected error is about weight·4^−bits. The median of a row gets the typical cost.
    """
    most, rates = tables.abs().amax(1).clamp_min(1e-30), bits.long()
    expected = weight.float() * torch.exp2(-2.0 * rates)
    expected = torch.where((rates > 0) & (expected > 0), expected, torch.nan)
    middle = expected.nanmedian(-1, keepdim=True).values.nan_to_num(1.0)
    # float64, because torch's float32 root on a CPU is often off in the last bit, unlike that of the kernels.
    root = (TYPICAL_COST * weight.float() / middle).double().sqrt().float()
    unit = 256.0 * root / torch.exp2(cost_shift(rates).float())
    factor = (unit * most[rates]).round().clamp(max=LARGEST)
    unit = factor / most[rates]
    margin = 256.0 * MARGIN**0.5 / torch.exp2(cost_shift(rates).float())
    entries = scaled_entries(tables)
    return CostUnits(entries, factor.to(torch.int16), unit, (factor + margin.minimum(unit)).round().clamp(max=LARGEST))


def scaled_entries(tables: Tensor) -> Tensor:
    """Return tables [9, 256] as int16 whose largest absolute value is `LARGEST`."""
    most = tables.abs().amax(1).clamp_min(1e-30)
    return (tables * (torch.full_like(most, LARGEST) / most).unsqueeze(1)).round().to(torch.int16)


def scaled(y: Tensor, unit: Tensor, limit: Tensor) -> Tensor:
    """Return components in integer units, int32."""
    return (y * unit).round().nan_to_num(0.0).clamp(-limit, limit).int()


def cost_shift(rates: Tensor) -> Tensor:
    """Number of bits by which differences are shifted before they are squared, by bits of a component."""
    return (rates - 4).clamp_min(0)


def near_count(after: int) -> int:
    """Return how many entries of a group a component may take before one of `after` bits, see `near_entries`."""
    return max(4, 1 << after >> 3)


def near_entries(entries: Tensor, bits: int, after: int) -> Tensor | None:
    """Return the entries that a component of `bits` bits may take before one of `after` bits, or None for all.

    Windows with the same newest 8 − after bits are a group, because paths in them meet at the next
    component. In each group the entries nearest to the middle of the component's bin may be taken,
    which the best path seldom misses. All may where either component has fewer bits than
    `LEAST_NEAR`, or where three of a group are equal, as in tables of numbers that depend on the newest
    bits only: equal entries alone would fix the older bits, which belong to the components before.

    entries: int16 [9, 256], see `CostUnits`. Returns bool [2·BINS + 1, 256], by bin and window.
    """
    if min(bits, after) < LEAST_NEAR:
        return None
    groups = entries[bits].int().view(-1, 1 << after)
    ordered = groups.sort(-1).values
    if bool((ordered[:, 2:] == ordered[:, :-2]).any()):
        return None
    middle = torch.arange(-BINS, BINS + 1, device=entries.device)[:, None, None] * LARGEST
    distance = (groups * BINS - middle).abs()  # [bins, groups, members]
    nearest = distance.argsort(dim=-1, stable=True)[..., : near_count(after)]
    return torch.zeros_like(distance, dtype=torch.bool).scatter_(-1, nearest, True).flatten(1)


def bins_of(y: Tensor, factor: Tensor) -> Tensor:
    """Return the bins int64 [n, D], 0 to 2·BINS, of scaled components int32 [n, D]. factor: int16 [D]."""
    per_bin = torch.full_like(y[0], BINS, dtype=torch.float32) / factor.clamp_min(1)  # number / tensor rounds twice
    return (y.float() * per_bin).round().clamp(-BINS, BINS).long() + BINS


Near = Callable[[int, int], "Tensor | None"]
"""`near_entries` of one set of tables."""


def search(y: Tensor, bits: list[int], units: CostUnits, near: Near) -> Tensor:
    """Search windows uint8 [n, A] for the A components that have bits."""
    n, A = y.shape
    y = scaled(y, units.unit, units.limit)
    begin, end = (int(x) for x in first_search(torch.tensor(bits)))
    free = torch.zeros(n, STATES, dtype=torch.int32, device=y.device)
    order = [d % A for d in range(end)]
    cost, chosen = _forward(free, order, y, bits, units, near, 0)
    best = (cost == cost.amin(1, keepdim=True)).int().argmax(1)
    width = bits[begin % A]
    group = _back(best, order, chosen, bits, end - begin)[0] >> width
    first = group << width  # older bits are in no window of the ring
    closed = torch.full_like(free, MOST_COST).scatter_(1, first[:, None], 0)
    order = [d % A for d in range(begin, begin + A)]
    cost, chosen = _forward(closed, order, y, bits, units, near, STATE_BITS)
    last = first | _meet(cost, width)[1].gather(1, group[:, None])[:, 0]
    windows = torch.empty_like(y, dtype=torch.uint8)
    windows[:, order] = _back(last, order, chosen, bits, A, first)[1]
    return windows


def _meet(cost: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the least costs int32 [n, groups] of paths that meet at a component of `bits` bits, and the older bits
    int64 that it shifts out. Of equal costs, the lowest older bits win."""
    older = torch.arange(1 << bits, dtype=torch.int32, device=cost.device)
    least = ((cost.view(len(cost), -1, 1 << bits) << STATE_BITS) + older).amin(-1)
    return least >> STATE_BITS, (least & (STATES - 1)).long()


def _forward(
    cost: Tensor, order: list[int], y: Tensor, bits: list[int], units: CostUnits, near: Near, fixed: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the least costs int32 [n, 256] of the paths to each state, and for each step the bits
    shifted out on that path.

    fixed: bits of the state at the beginning that are not free. Few entries can be reached as long as windows hold
        any of them, so all may be taken. So may those of components with factors below `LEAST_FACTOR`.
    """
    chosen, bins = [], bins_of(y, units.factor)
    for step, d in enumerate(order):
        least, older = _meet(cost, bits[d])
        chosen.append(older)
        if step and step % RENORMALISE == 0:
            least = least - least.amin(1, keepdim=True)
        entries = (units.entries[bits[d]].int() * units.factor[d].int() + (1 << 14)) >> 15
        off = (entries - y[:, d, None]).clamp(-LARGEST - 1, LARGEST)
        if shift := int(cost_shift(torch.tensor(bits[d]))):
            off = off.abs().clamp(max=MOST_COST >> shift).long() << shift
        cost = (least.repeat(1, 1 << bits[d]) + (off * off >> 16).int()).clamp(max=MOST_COST)
        fixed -= bits[d]
        if fixed <= 0 and units.factor[d] >= LEAST_FACTOR:
            some = near(bits[d], bits[(d + 1) % len(bits)])
            if some is not None:
                cost = torch.where(some[bins[:, d]], cost, MOST_COST + 1)
    return cost, chosen


def _back(
    state: Tensor, order: list[int], chosen: list[Tensor], bits: list[int], stop: int, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Trace back from the last states int64 [n] over `stop` steps: the states before them, and the
    windows [n, stop].

    first: the ring's first state. Bits of it in the first windows are set, because costs that
        saturate do not tell paths from other states.
    """
    windows = torch.zeros(len(state), stop, dtype=torch.uint8, device=state.device)
    for i in range(stop):
        d, brought = order[-1 - i], sum(bits[d] for d in order[: stop - i])
        if first is not None and brought < STATE_BITS:
            state = (state >> (STATE_BITS - brought) << (STATE_BITS - brought)) | (first >> brought)
        windows[:, stop - 1 - i] = state.to(torch.uint8)
        older = state & ((STATES >> bits[d]) - 1)
        state = (older << bits[d]) | chosen[-1 - i].gather(1, older[:, None])[:, 0]
    return state, windows
