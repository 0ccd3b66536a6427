"""SubGen (arXiv 2402.06082): a cache that grows more slowly than the context.

It keeps clusters of keys and samples of values.

`variant=kcenter` (§3.2, the paper's experiments): greedy k-center over the prompt's keys. The
centers and the `recent` latest tokens stay. Here tokens that always stay count as centers. Whenever
the budget is exceeded, centers are chosen again among the tokens held, down to 7/8 of the budget.
This avoids a new choice at every block.

`variant=stream` (Algorithm 1): a key joins the nearest cluster within δ, or starts a new one. Each
cluster keeps `slots` uniform samples of its keys, which estimate softmax's denominator. Samples of
all tokens with probability proportional to ‖v‖² estimate the numerator. Sinks and the `recent`
latest tokens are exact in both sums. The paper's algorithm has neither: `sinks=0,recent=0`. With
`delta=0`, δ starts at 0 and grows whenever there are more clusters than the budget allows; clusters
are then merged.

Good for: single odd facts such as passkeys, which policies by attention miss.
Bad for: quality: down to an eighth of the bytes, codes for all tokens diverge less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.policies.base import Candidates, Evicts, Selection


@dataclass(frozen=True)
class SubGen(Selection):
    """Options of SubGen.

    variant: "kcenter" or "stream".
    delta: (stream) δ, a distance between keys, or 0 to have it chosen.
    slots: (stream) samples per cluster, t in the paper.
    values: (stream) share of the budget for samples of values. The rest is for clusters.
    seed: (stream) seed of the samples.
    """

    evicts_ahead: ClassVar[bool] = True

    variant: Literal["kcenter", "stream"] = "kcenter"
    delta: float = 0.0
    slots: int = 4
    values: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("kcenter", "stream"):
            raise UserError(f"variant={self.variant} is not allowed; choose one of kcenter, stream")
        if not 0 <= self.delta <= torch.finfo(torch.float32).max:
            raise UserError(
                f"delta={self.delta:g} is not allowed; give a distance between keys, or 0 to have it chosen"
            )
        if not 1 <= self.slots <= 4096:
            raise UserError(f"slots={self.slots} is out of range; allowed are 1 to 4096 samples per cluster")
        if not 0 < self.values < 1:
            raise UserError(f"values={self.values:g} is not allowed; give a share of the budget between 0 and 1")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed} is out of range; allowed are 0 to {2**31 - 1}")
        if self.samples and self.rest:
            raise UserError(
                f"rest={self.rest:g} does not work with variant=stream, whose samples have no rank; use "
                "variant=kcenter, or leave rest out"
            )
        if self.samples and self.corrected_share:
            raise UserError(
                f"bias_correction={self.bias_correction} does not work with variant=stream, which estimates attention "
                "from samples; use bias_correction=off, or variant=kcenter"
            )

    @property
    def evicts(self) -> Evicts:
        """Tokens are evicted whenever a block is full."""
        return "block"

    @property
    def samples(self) -> bool:
        """True if the policy keeps samples instead of chosen tokens."""
        return self.variant == "stream"

    def sizes(self, kept: int) -> tuple[int, int]:
        """Return the number of value samples (s) and of clusters (m) for a budget of `kept` tokens.

        A sample is a key and a value. A cluster is a representative and `slots` keys.
        """
        room = max(1, self.room(kept) - self.latest(kept))
        s = max(1, round(room * self.values))
        return s, max(1, 2 * (room - s) // (self.slots + 1))

    def ranks(self, tokens: Candidates) -> Tensor:
        """Rank the centers of greedy k-center in order of choice, before all other tokens."""
        return farthest_first(tokens.keys(), tokens.positions >= 0, tokens.always, int(tokens.room.max()))


POLICY = SubGen


def farthest_first(keys: Tensor, alive: Tensor, centers: Tensor, room: int) -> Tensor:
    """Run Gonzalez's greedy k-center over keys [B, H, T, D].

    Starting from `centers` (bool [B, H, T]), or the first token if there are none, add the token
    farthest from all centers until there are `room` centers.

    Returns float32 [B, H, T]: inf for the initial centers, then values falling by 1, −1 for other
    tokens.
    """
    ranks = torch.full(alive.shape, -1.0, device=keys.device).masked_fill(centers, torch.inf)
    squares = keys.square().sum(-1)
    distances = torch.full_like(squares, torch.inf)
    for index in range(int(centers.sum(-1).max())):
        has = index < centers.sum(-1, keepdim=True)
        chosen = (~centers).int().argsort(dim=-1, stable=True)[..., index : index + 1]
        distances = torch.where(has, torch.minimum(distances, _to(keys, squares, chosen)), distances)
    distances = distances.masked_fill(~alive | centers, -torch.inf)
    fewest = int(centers.sum(-1).min())
    for step in range(room - fewest):
        far, chosen = distances.max(dim=-1, keepdim=True)
        ranks = torch.where(far.isneginf(), ranks, ranks.scatter(-1, chosen, float(room - step)))
        distances = torch.minimum(distances, _to(keys, squares, chosen)).scatter(-1, chosen, -torch.inf)
    return ranks


def _to(keys: Tensor, squares: Tensor, chosen: Tensor) -> Tensor:
    """Return squared distances [B, H, T] of all keys to the key at `chosen` [B, H, 1]."""
    center = keys.gather(2, chosen.unsqueeze(-1).expand(-1, -1, 1, keys.shape[-1]))
    products = torch.matmul(keys, center.transpose(-1, -2)).squeeze(-1)
    return squares + squares.gather(-1, chosen) - 2 * products
