"""Online clusters of keys with uniform samples (SubGen, arXiv 2402.06082, Algorithm 1).

A key joins the cluster of the nearest representative if that is within δ. It then replaces each of
the cluster's slots with probability 1/n. Otherwise it starts a new cluster and fills all its slots.
A block is drawn at once, with the same distribution. If c keys of a block join, making n + c
members, a slot gets one of them with probability c/(n + c), chosen uniformly.

With a budget of clusters, δ starts at 0. A key that would exceed the budget makes δ grow until an
eighth of the representatives have another one within δ. These clusters merge. Each slot of a merged
cluster takes the slot of one part, with probability in proportion to the part's size. It is
therefore again a uniform sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.schema import Check, optional, record, refuse, require, shortened, tensor, whole

EXACT = "donot_use_mm_for_euclid_dist"
"""Mode of `cdist` that subtracts first, so that a key has distance 0 to itself."""


class Head(NamedTuple):
    """Clusters of one head.

    centers: representatives, float32 [m, D].
    members: int64 [m], keys per cluster.
    slots: int32 [m, t], positions of samples.
    delta: δ.
    """

    centers: Tensor
    members: Tensor
    slots: Tensor
    delta: float


class Clusters(NamedTuple):
    """Clusters of all heads, padded to the same number.

    centers: [B, H, m, D] in the exact dtype.
    members: int32 [B, H, m], 0 for an unused cluster.
    slots: int32 [B, H, m, t], positions of samples.
    delta: float32 [B, H].
    most: maximum number of clusters, or None.
    """

    centers: Tensor
    members: Tensor
    slots: Tensor
    delta: Tensor
    most: int | None

    @staticmethod
    def empty(like: Tensor, t: int, delta: float, most: int | None) -> Clusters:
        """Return clusters without keys. Keys will have the shape of `like` [B, H, ·, D]."""
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
        """Return the check of such clusters in a file, see `cache/schema.py`.

        limited: True if `most` is set.
        """
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
        """Raise UserError unless sizes agree and slots hold positions below `below`."""
        m = self.centers.shape[2]
        alike = m == self.members.shape[2] == self.slots.shape[2] and (self.most is None or m <= self.most)
        require(alike, place, f"has different numbers of centers, members and slots, or more than {self.most}")
        used = self.members > 0
        first = bool((used[:, :, 1:] <= used[:, :, :-1]).all())
        require(first, f"{place}.members", "has unused clusters before used ones")
        named = self.slots[used]
        within = not named.numel() or (int(named.min()) >= 0 and int(named.max()) < below)
        require(within, f"{place}.slots", f"must name positions below {below}")

    def extended(self, keys: Tensor, positions: Tensor, generator: torch.Generator) -> Clusters:
        """Return the clusters after keys [B, H, n, D] at positions int32 [B, H, n]
        (−1: no token).
        """
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
        """Return log Σ n/t over the slots that hold each position, int32 [B, H, n].

        This is the log of the number of keys that the sample represents.
        """
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
    """Return the head after adding keys [n, D] in order."""
    while len(keys):
        labels, centers = _labels(head, keys, most)
        head = _sampled(head._replace(centers=centers), labels, positions[: len(labels)], generator)
        keys, positions = keys[len(labels) :], positions[len(labels) :]
        if len(keys):
            head = merged(head, generator)
    return head


def _labels(head: Head, keys: Tensor, most: int | None) -> tuple[Tensor, Tensor]:
    """Assign the first keys to clusters. Return their clusters, int64, and all representatives.

    Assignment stops at a key that would start more than `most` clusters.
    """
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
    """Update member counts and draw the slots for assigned keys."""
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
    """Increase δ until at least an eighth of the representatives (at least one) have another within
    δ.

    Each representative within δ of an earlier one joins the nearest one that stays.
    """
    if len(head.centers) < 2:
        return head._replace(delta=float("inf"))
    apart = torch.cdist(head.centers, head.centers, compute_mode=EXACT)
    nearest = apart.clone().fill_diagonal_(torch.inf).amin(dim=1).sort().values
    delta = float(nearest[len(nearest) // 8])
    into = _nearest_kept(apart, delta)
    kept, target = into.unique(return_inverse=True)
    target = target.to(head.slots.device)
    # each of the merging slots wins in proportion to its cluster's members: the first of
    # exponential clocks
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
    """Return, for m representatives with distances [m, m], the one that each joins: int64 [m].

    A representative that stays joins itself.
    """
    near = (apart <= delta).cpu().numpy()
    gone = near[0] & False
    kept = []
    for i in range(len(near)):
        if not gone[i]:
            kept.append(i)
            gone |= near[i]
    stay = torch.tensor(kept)
    return stay[apart[:, stay.to(apart.device)].argmin(dim=1).cpu()]
