"""Keys of a stream in clusters, with uniform samples of each (SubGen, arXiv 2402.06082, Algorithm 1).

A key joins the cluster of the nearest representative where that is within δ, and is then put into each of its slots
with probability 1/n; else it founds a cluster and fills all its slots. Of c keys of a block that join a cluster of n, a
slot ends with one of them with probability c/(n + c), any of them alike: the same, drawn at once.

Where a budget of clusters is given, δ is not: it starts at 0, and a key that would found one too many makes it grow
until an eighth of the representatives have another within it; those then merge. A slot of merged clusters is one of
their slots, in proportion to their sizes, and so again a uniform sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.schema import Check, optional, record, refuse, require, shortened, tensor, whole

EXACT = "donot_use_mm_for_euclid_dist"
"""Distances by differences: a key is at 0 from itself."""


class Head(NamedTuple):
    """One head: representatives float32 [m, D], members int64 [m], slots int32 [m, t] (positions), δ."""

    centers: Tensor
    members: Tensor
    slots: Tensor
    delta: float


class Clusters(NamedTuple):
    """All heads, padded to as many clusters: centers [B, H, m, D] in the exact type, members int32 [B, H, m] (0: none),
    slots int32 [B, H, m, t], delta float32 [B, H]. most: clusters that may be, or None."""

    centers: Tensor
    members: Tensor
    slots: Tensor
    delta: Tensor
    most: int | None

    @staticmethod
    def empty(like: Tensor, t: int, delta: float, most: int | None) -> Clusters:
        """Nothing seen; keys will be like `like` [B, H, ·, D]."""
        B, H, _, D = like.shape
        return Clusters(
            like.new_empty((B, H, 0, D)),
            like.new_empty((B, H, 0), dtype=torch.int32),
            like.new_empty((B, H, 0, t), dtype=torch.int32),
            like.new_full((B, H), delta, dtype=torch.float32),
            most,
        )

    @staticmethod
    def schema(like: Tensor, t: int, limited: bool) -> Check:
        """What a file may say of such clusters, see `cache/schema.py`. limited: whether their number is."""
        B, H, _, D = like.shape
        return record(
            {
                "centers": tensor(like.dtype, B, H, None, D),
                "members": tensor(torch.int32, B, H, None, low=0),
                "slots": tensor(torch.int32, B, H, None, t, low=-1),
                "delta": tensor(torch.float32, B, H, low=0, high=math.inf),
                "most": whole(1) if limited else optional(_nothing),
            }
        )

    def check(self, below: int, place: str) -> None:
        """Raise UserError unless all figures are of as many clusters, and slots name positions below a number."""
        m = self.centers.shape[2]
        alike = m == self.members.shape[2] == self.slots.shape[2] and (self.most is None or m <= self.most)
        require(alike, place, f"has centers, members and slots of different clusters, or more than {self.most}")
        used = self.members > 0
        first = bool((used[:, :, 1:] <= used[:, :, :-1]).all())
        require(first, f"{place}.members", "has empty clusters before others")
        named = self.slots[used]
        within = not named.numel() or (int(named.min()) >= 0 and int(named.max()) < below)
        require(within, f"{place}.slots", f"must name positions below {below}")

    def extended(self, keys: Tensor, positions: Tensor, generator: torch.Generator) -> Clusters:
        """After a block of keys [B, H, n, D] at positions int32 [B, H, n] (−1: no token)."""
        B, H = self.delta.shape
        heads = []
        for b in range(B):
            for h in range(H):
                used = int((self.members[b, h] > 0).sum())
                centers, members, slots = (x[b, h, :used] for x in (self.centers, self.members, self.slots))
                head = Head(centers.float(), members.long(), slots, float(self.delta[b, h]))
                real = positions[b, h] >= 0
                heads.append(_joined(head, keys[b, h, real].float(), positions[b, h, real], self.most, generator))
        m = max(len(head.centers) for head in heads)

        def together(parts: Iterable[Tensor]) -> Tensor:
            return torch.stack([_padded(x, m) for x in parts]).unflatten(0, (B, H))

        centers = together(head.centers for head in heads).to(self.centers.dtype)
        members = together(head.members for head in heads).to(torch.int32)
        slots = together(head.slots for head in heads)
        delta = self.delta.new_tensor([head.delta for head in heads]).view(B, H)
        return Clusters(centers, members, slots, delta, self.most)

    def log_weights(self, positions: Tensor) -> Tensor:
        """log Σ n/t over the slots that name each of positions int32 [B, H, n]: what such a key stands for."""
        t = self.slots.shape[-1]
        names = self.slots.masked_fill((self.members == 0).unsqueeze(-1), -1).flatten(2)
        slots, order = names.sort(dim=-1)
        first = torch.searchsorted(slots, positions.contiguous())
        count = torch.searchsorted(slots, positions.contiguous(), right=True) - first
        cluster = order.gather(-1, first.clamp(max=max(0, slots.shape[-1] - 1))) // t
        return (count * self.members.gather(-1, cluster)).float().log() - torch.tensor(float(t)).log()


def _nothing(value: object, place: str) -> None:
    refuse(place, f"is {shortened(value)}, and must be null")


def _padded(x: Tensor, m: int) -> Tensor:
    return torch.cat([x, x.new_zeros((m - len(x), *x.shape[1:]))])


def _joined(head: Head, keys: Tensor, positions: Tensor, most: int | None, generator: torch.Generator) -> Head:
    """The head after keys [n, D], one after the other."""
    while len(keys):
        labels, centers = _labels(head, keys, most)
        head = _sampled(head._replace(centers=centers), labels, positions[: len(labels)], generator)
        keys, positions = keys[len(labels) :], positions[len(labels) :]
        if len(keys):
            head = merged(head, generator)
    return head


def _labels(head: Head, keys: Tensor, most: int | None) -> tuple[Tensor, Tensor]:
    """Clusters int64 of the first keys, in the order of the stream, and all representatives; it ends at a key that
    would found one more than `most`."""
    n, m = len(keys), len(head.centers)
    distance, label = keys.new_full((n,), torch.inf), torch.zeros(n, dtype=torch.int64, device=keys.device)
    if m:
        distance, label = torch.cdist(keys, head.centers, compute_mode=EXACT).min(dim=1)
    founders: list[int] = []
    start = 0
    while start < n:
        far = (distance[start:] > head.delta).nonzero()
        if len(far) == 0:
            break
        start += int(far[0])
        if most is not None and m + len(founders) == most:
            label = label[:start]
            break
        own = torch.cdist(keys[start:], keys[start : start + 1], compute_mode=EXACT).squeeze(1)
        nearer = own < distance[start:]
        distance[start:] = torch.where(nearer, own, distance[start:])
        label[start:] = torch.where(nearer, m + len(founders), label[start:])
        founders.append(start)
        start += 1
    return label, torch.cat([head.centers, keys[founders]])


def _sampled(head: Head, labels: Tensor, positions: Tensor, generator: torch.Generator) -> Head:
    """Members counted and slots drawn for keys that have joined."""
    m, t = len(head.centers), head.slots.shape[1]
    before = _padded(head.members, m)
    joined = torch.bincount(labels, minlength=m)
    after = before + joined
    first = joined.cumsum(0) - joined
    u, v = torch.rand((2, m, t), dtype=torch.float64, generator=generator).to(labels.device)
    pick = first.unsqueeze(1) + (v * joined.unsqueeze(1)).long()
    chosen = positions[labels.argsort(stable=True)][pick.clamp(max=max(0, len(labels) - 1))] if len(labels) else None
    slots = _padded(head.slots, m)
    if chosen is not None:
        slots = torch.where(u < (joined / after.clamp(min=1)).unsqueeze(1), chosen, slots)
    return head._replace(members=after, slots=slots)


def merged(head: Head, generator: torch.Generator) -> Head:
    """δ grown until an eighth of the representatives, at least one, have another within it; each that is within δ of an
    earlier one joins the nearest that stays."""
    if len(head.centers) < 2:
        return head._replace(delta=float("inf"))
    apart = torch.cdist(head.centers, head.centers, compute_mode=EXACT)
    nearest = apart.clone().fill_diagonal_(torch.inf).amin(dim=1).sort().values
    delta = float(nearest[len(nearest) // 8])
    into = _nearest_kept(apart, delta)
    kept, target = into.unique(return_inverse=True)
    target = target.to(head.slots.device)
    # of the slots that meet, each wins in proportion to its cluster's members: the first of exponential clocks
    clock = torch.empty(head.slots.shape, dtype=torch.float64).exponential_(generator=generator).to(target.device)
    clock = clock / head.members.unsqueeze(1)
    index = target.unsqueeze(1).expand_as(clock)
    earliest = clock.new_full((len(kept), clock.shape[1]), torch.inf).scatter_reduce(0, index, clock, "amin")
    winner = clock == earliest.gather(0, index)
    slots = torch.full_like(head.slots[: len(kept)], -1).scatter_reduce(
        0, index, head.slots.masked_fill(~winner, -1), "amax"
    )
    members = torch.zeros_like(head.members[: len(kept)]).scatter_add(0, target, head.members)
    return Head(head.centers[kept.to(target.device)], members, slots, delta)


def _nearest_kept(apart: Tensor, delta: float) -> Tensor:
    """For each of m representatives with distances [m, m] the one that it joins, itself where it stays: int64 [m]."""
    near = (apart <= delta).cpu().numpy()
    gone = near[0] & False
    kept = []
    for i in range(len(near)):
        if not gone[i]:
            kept.append(i)
            gone |= near[i]
    stay = torch.tensor(kept)
    return stay[apart[:, stay.to(apart.device)].argmin(dim=1).cpu()]
