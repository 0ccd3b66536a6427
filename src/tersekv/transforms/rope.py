"""Rotary position embeddings (RoFormer, arXiv 2104.09864), taken off keys before coding and put back on reading.

Before RoPE a key's channels have ranges and outliers that stay where they are over the sequence; RoPE mixes pairs of
channels by an angle that depends on the position, and spreads them (KVQuant, arXiv 2401.18079, §3.2). RoPE is
orthogonal up to a factor, so it can be taken off the key that a cache receives. The model's own code says how (all its
rope types, partial rotation, layouts); whatever it says, taking off and putting back cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.transforms.rope_steps import STEPS, TURNS, Steps, rope_steps, rope_turns

CosSin = Callable[[Tensor, int], tuple[Tensor, Tensor]]
Apply = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rope:
    """RoPE of one layer.

    cos_sin(positions int64 [n], length): cos and sin [n, R] as the model makes them for a sequence that has `length`
    tokens so far (it matters where frequencies change with the length: dynamic NTK, LongRoPE). apply(x, cos, sin):
    rotates x [B, H, n, D] by cos and sin [1 or B, n, R], linear in them. varies: whether `length` matters.
    """

    def __init__(self, cos_sin: CosSin, apply: Apply, varies: bool = False) -> None:
        self._cos_sin, self._apply, self.varies = cos_sin, apply, varies
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._channels: dict[tuple[int, int], Tensor | None] = {}
        self._steps: Steps | None = None
        self._turns: dict[tuple[int, int], Tensor | None] = {}

    def cos_sin(self, first: int, n: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [n, R] of positions first to first + n; negative positions (padding) are allowed."""
        if self.varies:
            cos, sin = self._made(torch.arange(first, first + n), length)
            return cos.to(device), sin.to(device)
        cos, sin = self._up_to(max(first + n, 1 - first), device)
        if first >= 0:
            return cos[first : first + n], sin[first : first + n]
        positions = torch.arange(first, first + n, device=device)
        return cos[positions.abs()], sin[positions.abs()] * positions.sign().unsqueeze(-1)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [..., R] of any positions ≥ 0, as for a short sequence."""
        cos, sin = self._up_to(int(positions.max()) + 1 if positions.numel() else 1, positions.device)
        return cos[positions], sin[positions]

    def _up_to(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A table of at least n positions on a device, kept there: all layers with this RoPE share it."""
        table = self._tables.get(device)
        if table is None or len(table[0]) < n:
            capacity = -(-n // 1024) * 1024
            table = self._made(torch.arange(capacity), 1)
            self._tables[device] = table = (table[0].to(device), table[1].to(device))
        return table

    def _made(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self._cos_sin(positions, length)
            return cos.float().cpu(), sin.float().cpu()

    def steps(self) -> Steps:
        """How cosines and sines go on from any token, on the CPU; where `length` does not matter."""
        if self._steps is None:
            cos, sin = self._made(torch.arange(STEPS), 1)
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                self._steps = rope_steps(cos, sin, self._first_equal(cos.shape[-1]))
        return self._steps

    def turns(self, D: int, columns: int) -> Tensor | None:
        """How cosines and sines of D channels go on from any token, in 16 bits; see `rope_turns`."""
        if (D, columns) not in self._turns:
            channels = self.channels(D, columns)
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                made = self._made(torch.arange(TURNS), 1)
                self._turns[D, columns] = None if channels is None else rope_turns(*made, channels)
        return self._turns[D, columns]

    def turn(self, first: int, n: int, D: int) -> Turn | None:
        """RoPE of positions first to first + n on D channels; None where `apply` does not turn pairs of channels."""
        cos, sin = self.cos_sin(first, n, first + n, torch.device("cpu"))
        pairs = self.channels(D, cos.shape[-1])
        return None if pairs is None else Turn(cos, sin, pairs)

    def tables(self, stepped: bool = False, turned: int = 0) -> list[Tensor]:
        """What is kept; where a CPU reads: stepped: `steps`, too; turned: `turns` of so many channels, too."""
        kept = [x for table in self._tables.values() for x in table]
        here = self._tables.get(torch.device("cpu"))
        if here is not None and stepped:
            kept += self.steps()
        if here is not None and turned and (turns := self.turns(turned, here[0].shape[-1])) is not None:
            kept.append(turns)
        return kept

    def channels(self, D: int, columns: int) -> Tensor | None:
        """`apply` as pairs of channels: int32 [D, 4], where channel d becomes x[d]·cos[c] + sign·x[partner]·sin[s] with
        row (partner, c, s, sign), and stays where its partner is −1. Columns of equal cosines and sines are named by
        the first of them. None where `apply` is not of that form, or takes another number
        of channels."""
        if (D, columns) not in self._channels:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                try:
                    self._channels[D, columns] = self._probe(D, columns)
                except RuntimeError:
                    self._channels[D, columns] = None
        return self._channels[D, columns]

    def _probe(self, D: int, columns: int) -> Tensor | None:
        """What unit vectors become tells the pairs; a random vector, whether that is all."""
        generator = torch.Generator().manual_seed(0)
        value = torch.arange(1, columns + 1, dtype=torch.float32).expand(1, D, -1)
        unit, zero = torch.eye(D).view(1, 1, D, D), torch.zeros(1, D, columns)
        turned = self._apply(unit, value, zero)[0, 0].T  # [to, from]: the column of cos, or 1 where nothing is done
        across = self._apply(unit, zero, value)[0, 0].T - self._apply(unit, zero, zero)[0, 0].T
        moved = across.abs().sum(1) > 0
        partner = across.abs().argmax(1)
        entry = across.gather(1, partner[:, None])[:, 0]
        rows = torch.stack([partner, turned.diagonal() - 1, entry.abs() - 1, entry.sign()], 1)
        rows[~moved] = torch.tensor([-1.0, 0.0, 0.0, 0.0])
        rows = rows.round().long().clamp(min=-1, max=max(D, columns) - 1)
        if bool((rows[moved, 1:3].amin(1) < 0).any() if bool(moved.any()) else False):
            return None
        rows[:, 1:3] = self._first_equal(columns)[rows[:, 1:3].clamp(min=0)]
        x, angle = torch.randn(1, 1, 3, D, generator=generator), torch.randn(1, 3, columns, generator=generator)
        cos, sin = angle.cos()[..., self._first_equal(columns)], angle.sin()[..., self._first_equal(columns)]
        expected = x * torch.where(moved, cos[:, None][..., rows[:, 1]], 1.0)
        expected += torch.where(moved, rows[:, 3] * x[..., rows[:, 0]] * sin[:, None][..., rows[:, 2]], 0.0)
        if not torch.allclose(self._apply(x, cos, sin), expected, atol=1e-5):
            return None
        return rows.to(torch.int32).contiguous()

    def _first_equal(self, columns: int) -> Tensor:
        """int64 [columns]: of each column of cos and sin the first that is the same at some forty positions."""
        cos, sin = self._made(torch.cat([torch.arange(20), torch.arange(1000, 1020)]), 1020)
        both = torch.cat([cos, sin]).T  # [columns, positions]
        same = (both[:, None] == both[None]).all(-1)
        return same.int().argmax(1)

    def put(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated x [B, H, n, D]; cos and sin [1 or B, n, R], or [B, H, n, R] where heads differ."""
        if cos.dim() == 3:
            return self._apply(x, cos, sin)
        turned = self._apply(x.flatten(0, 1).unsqueeze(1), cos.flatten(0, 1), sin.flatten(0, 1))
        return turned.squeeze(1).unflatten(0, x.shape[:2])

    def take_off(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Inverse of `put`, also where cos and sin carry a factor (YaRN)."""
        squared = cos * cos + sin * sin
        return self.put(x, cos / squared, -sin / squared)

    def pull_back(self, gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The gradient with respect to what `put` was given, from that with respect to what it returned: its transpose,
        which differs from its inverse where cos and sin carry a factor (YaRN)."""
        return self.put(gradient, cos, -sin)


class Turn(NamedTuple):
    """RoPE of the tokens of one sequence, as tensors alone: cos, sin [n, R], and `Rope.channels` [D, 4]."""

    cos: Tensor
    sin: Tensor
    pairs: Tensor

    def put(self, x: Tensor) -> Tensor:
        """Rotated x [B, H, m·n, D], m such sequences one behind the other."""
        partner, c, s, sign = self.pairs.long().unbind(-1)
        moved = partner >= 0
        cos = torch.where(moved, self.cos[:, c.clamp_min(0)], 1.0)
        sin = torch.where(moved, self.sin[:, s.clamp_min(0)] * sign, 0.0)
        parts = x.unflatten(2, (-1, len(cos)))
        return (parts * cos + parts[..., partner.clamp_min(0)] * sin).flatten(2, 3)


def standard_rope(R: int, theta: float = 10_000.0) -> Rope:
    """Llama's RoPE on the first R channels: frequencies θ^(−2i/R), channel i paired with i + R/2."""
    frequency = theta ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)

    def cos_sin(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * torch.cat([frequency, frequency])
        return angle.cos(), angle.sin()

    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., :R].chunk(2, dim=-1)
        turned = x[..., :R] * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
        return torch.cat([turned, x[..., R:]], dim=-1)

    return Rope(cos_sin, apply)


def _still(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return torch.ones(len(positions), 1), torch.zeros(len(positions), 1)


NO_ROPE = Rope(_still, lambda x, *_: x)
"""Of models whose keys do not hold their positions."""
