"""SubGen (arXiv 2402.06082): a cache that grows slower than the context, by clusters of keys and samples of values.

`variant=kcenter` (§3.2, the paper's experiments): greedy k-center over the keys of the prompt and the `recent` latest
tokens; the centers' keys and values stay. Ours counts tokens that stay anyway as centers, and chooses again among what
is held whenever the budget is exceeded, an eighth less than it, so that it does not choose at every block.

`variant=stream` (Algorithm 1): a key joins the nearest cluster within δ, or founds one; each cluster keeps `slots`
uniform samples of its keys, which estimate softmax's denominator, and of all tokens a number of samples by ‖v‖²
estimates its numerator. Sinks and the `recent` latest tokens are exact in both sums (0 of each: the paper's algorithm).
With `delta=0`, δ starts at 0 and grows, merging clusters, whenever there would be more than the budget has room for.
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
    """variant: kcenter or stream. For stream: delta, δ in units of keys, or 0; slots, samples per cluster (t); values,
    share of the budget for samples of values, the rest is for clusters; seed."""

    evicts: ClassVar[Evicts] = "block"

    variant: Literal["kcenter", "stream"] = "kcenter"
    delta: float = 0.0
    slots: int = 4
    values: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("kcenter", "stream"):
            raise UserError(f"variant={self.variant} is not allowed; choose one of kcenter, stream")
        if not 0 <= self.delta < float("inf"):
            raise UserError(f"delta={self.delta:g} is not allowed; give a distance of keys, or 0 to have it chosen")
        if not 1 <= self.slots <= 4096:
            raise UserError(f"slots={self.slots} is out of range; allowed are 1 to 4096 samples per cluster")
        if not 0 < self.values < 1:
            raise UserError(f"values={self.values:g} is not allowed; give a share of the budget between 0 and 1")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"seed={self.seed} is out of range; allowed are 0 to {2**31 - 1}")

    @property
    def samples(self) -> bool:
        """Whether it holds samples instead of chosen tokens."""
        return self.variant == "stream"

    def sizes(self, kept: int) -> tuple[int, int]:
        """For a budget of `kept` tokens: samples of values (s), each a key and a value, and clusters (m), each a
        representative and `slots` keys."""
        room = max(1, self.room(kept) - self.latest(kept))
        s = max(1, round(room * self.values))
        return s, max(1, 2 * (room - s) // (self.slots + 1))

    def ranks(self, tokens: Candidates) -> Tensor:
        """Greedy k-center: centers by the order in which they were chosen, the others after them."""
        return farthest_first(tokens.keys(), tokens.positions >= 0, tokens.always, int(tokens.room.max()))


POLICY = SubGen


def farthest_first(keys: Tensor, alive: Tensor, centers: Tensor, room: int) -> Tensor:
    """Gonzalez's greedy k-center over keys [B, H, T, D]: to `centers` (bool [B, H, T]), or the first token where there
    are none, adds the token farthest from all, until there are `room`. float32 [B, H, T]: inf for the first ones,
    then falling by 1, −1 for the others."""
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
    """Squared distances [B, H, T] of all keys to the one at `chosen` [B, H, 1]."""
    center = keys.gather(2, chosen.unsqueeze(-1).expand(-1, -1, 1, keys.shape[-1]))
    products = torch.matmul(keys, center.transpose(-1, -2)).squeeze(-1)
    return squares + squares.gather(-1, chosen) - 2 * products
