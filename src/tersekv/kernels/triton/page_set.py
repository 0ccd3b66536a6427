"""Segments prepared for the attention kernel: everything that does not depend on the query, built
once.

Segments of the same layouts form a *group*, which one launch reads. Packed pages are passed to the
kernel as a table on the device, one row of addresses and numbers per page. A few exact segments are
passed as arguments instead. They change at every step, so a table would have to be copied to the
device each time.

Shapes: B batch, H key-value heads, R query rows per head, D head dim of keys, Dv of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.attend_packed import Operand
from tersekv.kernels.attend_segments import Segment
from tersekv.kernels.triton import trees
from tersekv.kernels.triton.leaves import UnreadableError, field_codes, identity, number
from tersekv.kernels.triton.trees import Keys, Values
from tersekv.kernels.triton.tuning import LaunchPlan

MAX_EXACT = 4
"""Most exact segments that a launch takes as arguments. A kernel is compiled for each number of
them."""


class PagePart(NamedTuple):
    """One segment as the kernel reads it.

    starts: int64 [B·H + 1], the token where each head's own ones begin, see `ends` of `PackedPages`, or None.
    most: most tokens of a head.
    """

    keys: Keys
    values: Values
    tokens: int
    head_dim: int
    starts: Tensor | None = None
    most: int = 0

    def fields(self) -> tuple[tuple[Any, ...], ...]:
        """Return tensors and numbers of each key leaf, of each value leaf, and of the angles."""
        return *(leaf.fields for leaf in (*self.keys.leaves, *self.values.leaves)), self.keys.angles

    def likeness(self) -> tuple[Any, ...]:
        """Return a key that is equal for segments that one launch can read."""
        types = tuple(x.dtype if isinstance(x, Tensor) else type(x) for fields in self.fields() for x in fields)
        specs = tuple(leaf.spec for leaf in self.keys.leaves), tuple(leaf.spec for leaf in self.values.leaves)
        origins = tuple(leaf.origin for leaf in self.keys.leaves), self.values.origin
        return *specs, self.keys.roped, identity(self.keys.pairs), *origins, types, self.head_dim


def part(
    keys: Operand,
    values: Operand | None,
    device: torch.device,
    latent: bool = False,
    ends: Tensor | None = None,
) -> PagePart:
    """Check a segment and describe it. values: None for an output without channels. latent: see `prepare`.

    Raises:
        UnreadableError: the kernels cannot read it. ValueError: keys and values have different
        numbers of tokens.
    """
    if latent:
        return PagePart(*trees.latents(keys, device), *(size := trees.size(keys)), None, size[0])
    starts, size = None, trees.size(keys)
    most = size[0]
    if ends is not None:
        starts = torch.nn.functional.pad(ends.flatten(), (1, 0))
        most = int(starts.diff().max())
    own = trees.NO_VALUES if values is None else trees.values(values, device)
    made = PagePart(trees.keys(keys, device), own, *size, None if starts is None else starts.to(device), most)
    if values is not None and (n := trees.size(values)[0]) != made.tokens:
        raise ValueError(f"values: expected T = {made.tokens} tokens like the keys, got {n}")
    return made


class Group:
    """Segments that one launch reads. numbers: their indices in the page set. tabled: True to pass
    them as a table on the device."""

    def __init__(self, parts: Sequence[PagePart], numbers: Sequence[int], tabled: bool, device: torch.device) -> None:
        first = parts[0]
        self.parts, self.numbers, self.device = list(parts), list(numbers), device
        self.keys, self.values = first.keys, first.values
        self.key_specs = tuple(leaf.spec for leaf in first.keys.leaves)
        self.value_specs = tuple(leaf.spec for leaf in first.values.leaves)
        self.field_codes: tuple[tuple[int, ...], ...] = ()
        self.table: Tensor | None = None
        self.segments: tuple[Any, ...] = ()
        self._plans: dict[Any, tuple[LaunchPlan, int, Tensor | None]] = {}
        if tabled:
            self._make_table()
        else:
            n = len(self.key_specs)
            fields = [part.fields() for part in parts]
            self.segments = tuple(
                (of[:n], of[n:-1], of[-1], part.tokens) for of, part in zip(fields, parts, strict=True)
            )

    @property
    def tokens(self) -> int:
        """Number of tokens of all segments, of the head that has the most."""
        return sum(part.most for part in self.parts)

    def _make_table(self) -> None:
        rows, codes = [], []
        columns = list(zip(*(part.fields() for part in self.parts), strict=True))
        at = 3
        for pages in columns:  # for each leaf, and the angles
            codes.append((at, *field_codes(pages)))
            at += len(pages[0])
        start = 0
        for i, part in enumerate(self.parts):
            own = 0 if part.starts is None else part.starts.data_ptr()
            rows.append([part.tokens, start, own, *(number(field) for pages in columns for field in pages[i])])
            start += part.tokens
        self.field_codes = tuple(codes)
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)

    def planned(self, key: Any, make: Callable[[], LaunchPlan]) -> tuple[LaunchPlan, int, Tensor | None]:
        """Return the plan, its number of splits and, with a table, the runs of
        `attend_kernel.attend`. It is made once per `key`."""
        if key not in self._plans:
            self._plans[key] = self._runs(make())
        return self._plans[key]

    def forget_plans(self) -> None:
        """Plan again at the next launch."""
        self._plans.clear()

    def _runs(self, plan: LaunchPlan) -> tuple[LaunchPlan, int, Tensor | None]:
        tile = 32 * plan.blocks
        padded = [-(-part.most // tile) * tile for part in self.parts]
        if self.table is None and len(padded) > 1 and sum(padded) <= 2 * tile:
            # sinks and window: two splits plus a merge would take longer
            plan = plan._replace(split_tokens=2 * tile)
        splits = max(1, -(-sum(padded) // plan.split_tokens))
        if self.table is None:
            return plan, splits, None
        first_runs, runs = [0], []
        for split in range(splits):
            begin, end, start = split * plan.split_tokens, (split + 1) * plan.split_tokens, 0
            for page, (part, room) in enumerate(zip(self.parts, padded, strict=True)):
                first, last = max(0, begin - start), min(part.most, end - start)
                if first < last:
                    runs.append((page, first, last))
                start += room
            first_runs.append(len(runs))
        flat = [*first_runs, *(n for run in runs for n in run)]
        return plan, splits, torch.tensor(flat, dtype=torch.int32).to(self.device, non_blocking=True)


class PageSet:
    """Segments of one layer, made by `prepare`. It holds references to their tensors and does not
    notice if their memory moves."""

    def __init__(self, groups: Sequence[Group], segments: int, device: torch.device) -> None:
        self.groups, self.segments, self.device = list(groups), segments, device

    def with_segments(self, segments: Sequence[Segment]) -> PageSet:
        """Return a page set with these segments after its own, which are not built again.

        This is for segments that change at every step. Exact segments need no copy to the device.

        Raises:
            UnreadableError, ValueError: see `prepare`.
        """
        if not segments:
            return self
        more = _groups(segments, self.segments, self.device)
        return PageSet([*self.groups, *more], self.segments + len(segments), self.device)


def prepare(segments: Sequence[Segment], latent: bool = False) -> PageSet:
    """Check the segments of one layer and build their kernel arguments. Masks are ignored.

    Args:
        segments: at least one, each with keys [B, H, T, D] and values [B, H, T, Dv] of its own T,
            any layouts.
        latent: True if the values are the latents that keys begin with.

    Raises:
        UnreadableError: the kernels cannot read a segment. ValueError: keys and values of a segment
        have different numbers of tokens.
    """
    device = trees.device_of(segments[0].keys)
    return PageSet(_groups(segments, 0, device, latent), len(segments), device)


def _groups(segments: Sequence[Segment], first: int, device: torch.device, latent: bool = False) -> list[Group]:
    """Group segments. Their indices in the page set are from `first` on."""
    alike: dict[Any, list[tuple[int, Segment, PagePart]]] = {}
    for i, segment in enumerate(segments):
        described = part(segment.keys, segment.values, device, latent, segment.ends)
        exact = isinstance(segment.keys, Tensor) and isinstance(segment.values, Tensor) and not segment.is_page
        alike.setdefault((exact, described.likeness()), []).append((first + i, segment, described))
    groups = []
    for (exact, _), members in alike.items():
        as_arguments = exact or (len(members) == 1 and not members[0][1].is_page)
        size = MAX_EXACT if exact else len(members)
        for chunk in (members[i : i + size] for i in range(0, len(members), size)):
            groups.append(Group([m[2] for m in chunk], [m[0] for m in chunk], not as_arguments, device))
    return groups


def why_not(segment: Segment, device: torch.device, in_pages: bool = False) -> str | None:
    """Return the reason why the kernels cannot read a segment, or None. in_pages: the page table
    may change the order of its tokens. Only checks; no tensor is made."""
    try:
        keys = trees.keys(segment.keys, device, dry=True)
        values = trees.values(segment.values, device, dry=True)
    except UnreadableError as unreadable:
        return str(unreadable)
    if not in_pages:
        return None
    return trees.why_not_in_pages("keys", keys.leaves, keys.roped) or trees.why_not_in_pages("values", values.leaves)


Strided = tuple[Tensor, int, int, int, int, int]
"""A mask as kernel argument: bytes, strides of batch row, head, query and token, and its number of
queries."""


def strided(mask: Tensor) -> Strided:
    """Convert a mask bool [q, T], [B, q, T] or [B, H, q, T] to a kernel argument."""
    mask = _of_heads(mask)
    b, h, q, t = (0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True))
    return mask.view(torch.uint8), b, h, q, t, mask.shape[2]


def joined_mask(masks: Sequence[Tensor | None], tokens: Sequence[int]) -> Tensor | None:
    """Join masks to one [B, H, q, ΣT]; tokens: number per segment. Nothing is copied if all are
    neighbouring columns of one tensor."""
    there = [_of_heads(mask) for mask in masks if mask is not None]
    if not there:
        return None
    first = there[0]
    if len(there) == len(masks) and _neighbours(there):
        size = (*first.shape[:3], sum(tokens))
        return first.as_strided(size, first.stride())
    shape = [max(mask.shape[i] for mask in there) for i in range(3)]
    found = iter(there)
    columns = [
        first.new_ones((1, 1, 1, n)).expand(*shape, n) if mask is None else next(found).expand(*shape, n)
        for mask, n in zip(masks, tokens, strict=True)
    ]
    return torch.cat(columns, dim=-1)


def _of_heads(mask: Tensor) -> Tensor:
    """Return a mask bool [q, T], [B, q, T] or [B, H, q, T] with four axes."""
    return mask[None, None] if mask.dim() == 2 else mask.unsqueeze(1) if mask.dim() == 3 else mask


def _neighbours(masks: Sequence[Tensor]) -> bool:
    """True if masks [B, H, q, T] are consecutive columns of one tensor."""
    first, strides = masks[0], masks[0].stride()
    place = first.storage_offset()
    for mask in masks:
        same = mask.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or mask.shape[:3] != first.shape[:3] or mask.storage_offset() != place or mask.stride() != strides:
            return False
        place += mask.shape[3] * strides[3]
    return True
