"""Rotary position embeddings (RoFormer, arXiv 2104.09864), taken off keys before coding and put back on reading.

Before RoPE a key's channels have ranges and outliers that stay where they are over the sequence; RoPE mixes pairs of
channels by an angle that depends on the position, and spreads them (KVQuant, arXiv 2401.18079, §3.2). RoPE is
orthogonal up to a factor, so it can be taken off the key that a cache receives. The model's own code says how (all its
rope types, partial rotation, layouts); whatever it says, taking off and putting back cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.codecs.transforms.rope_offsets import (
    INT16_OFFSETS,
    OFFSETS,
    OffsetTable,
    int16_rope_offset_table,
    rope_offset_table,
)
from tersekv.codecs.transforms.rope_pairs import Apply, pairs_of
from tersekv.codecs.transforms.rope_table import MAX_POSITION, given_table, look_up, rope_table, table_positions
from tersekv.errors import UserError
from tersekv.kernels.registry import NotTaken
from tersekv.tensors import last_contiguous

CosSin = Callable[[Tensor, int], tuple[Tensor, Tensor]]
PROPORTIONAL = 0.02
"""Largest difference of cosines at position 70,000, where float32 rounds angles by up to 0.004 per digit."""


class Rope:
    """RoPE of one layer.

    cos_sin(positions int64 [n], length): cos and sin [n, R] as the model makes them for a sequence that has `length`
    tokens so far (it matters where frequencies change with the length: dynamic NTK, LongRoPE). apply(x, cos, sin):
    rotates x [B, H, n, D] by cos and sin [1 or B, n, R], linear in them. varies: True if `length` matters, or if a
    position's angle is not proportional to it; cosines then come from the model for each segment. Otherwise they come
    from a table of 256 rows (`rope_table.py`), which agrees with the model's up to float32 rounding of its angles.
    """

    def __init__(self, cos_sin: CosSin, apply: Apply, varies: bool = False) -> None:
        self._cos_sin, self._apply, self.varies = cos_sin, apply, varies
        self._tables: dict[torch.device, Tensor] = {}
        self._unique: tuple[Tensor, Tensor] | None = None
        self._channels: dict[int, Tensor | None] = {}
        self._one_angle: dict[int, bool] = {}
        self._offset_table: OffsetTable | None = None
        self._int16_offset_tables: dict[int, Tensor | None] = {}
        self._natives: dict[tuple[int, bool], tuple[Tensor, Any]] = {}  # with their tables

    def __getstate__(self) -> dict[str, Any]:
        """Copies make their own objects of the extension."""
        return self.__dict__ | {"_natives": {}}

    def angles(self, first: int, n: int, padding: Tensor | None = None, device: torch.device | str = "cpu") -> Angles:
        """Angles of n tokens from position `first` on; padding int64 [B]: of each batch row, what its positions are
        less. Negative positions (of padding) are allowed. Where `length` does not matter."""
        self._check_reach(first + n)
        places = torch.tensor([first], device=device) - (0 if padding is None else padding.to(device))
        return Angles(self, self.table(places.device), places.to(torch.int32).view(-1, 1, 1), n)

    def angles_at(self, positions: Tensor) -> Angles:
        """Angles of tokens at any positions, int [T], [B, T] or [B, H, T]. Where `length` does not matter."""
        if positions.is_cpu and positions.numel():  # elsewhere a check would wait for the device at every token
            self._check_reach(int(positions.max()) + 1)
        shape = (1, 1) if positions.dim() == 1 else (len(positions), 1) if positions.dim() == 2 else positions.shape[:2]
        places = positions.to(torch.int32).reshape(*shape, -1)
        return Angles(self, self.table(places.device), places, positions.shape[-1])

    def given(self, cos: Tensor, sin: Tensor) -> Angles:
        """Angles of tokens whose cos and sin [1 or B, T, R] are at hand."""
        B, T, _ = cos.shape
        first = self._columns()[0].to(cos.device)
        table = given_table(*(x[..., first].flatten(0, 1) for x in (cos, sin)))
        places = torch.arange(B, dtype=torch.int32, device=cos.device) * T
        return Angles(self, table, places.view(-1, 1, 1), T)

    def cos_sin(self, first: int, n: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [n, R] of positions first to first + n; negative positions (padding) are allowed."""
        if not self.varies:
            cos, sin = self.angles(first, n, device=device).cos_sin()
            return cos[0], sin[0]
        cos, sin = self._made(torch.arange(first, first + n), length)
        return cos.to(device), sin.to(device)

    @staticmethod
    def _check_reach(end: int) -> None:
        if end > MAX_POSITION + 1:
            raise UserError(f"a token at position {end - 1:,} was given; positions up to {MAX_POSITION:,} are allowed")

    def table(self, device: torch.device) -> Tensor:
        """The table of `rope_table.py`, one per device for all layers with this RoPE."""
        if device not in self._tables:
            first, _ = self._columns()
            made = rope_table(*(x[:, first] for x in self._made(table_positions(), 1)))
            self._tables[device] = made.to(device)
        return self._tables[device]

    def is_proportional(self) -> bool:
        """True if angles are proportional to positions, as the table takes them to be: up to float32 rounding."""
        positions = torch.tensor([1, 77, 4097, 70_000])
        ours, theirs = self.angles_at(positions).cos_sin(), self._made(positions, 1)
        size = float(torch.hypot(*theirs).amax())
        return all(torch.allclose(x[0], y, rtol=0, atol=PROPORTIONAL * size) for x, y in zip(ours, theirs, strict=True))

    def _made(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self._cos_sin(positions, length)
            return cos.float().cpu(), sin.float().cpu()

    def _columns(self) -> tuple[Tensor, Tensor]:
        """The model's columns of cos and sin that differ, int64 [unique], and which of them each column equals,
        int64 [R]; equal means at some forty positions."""
        if self._unique is None:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                cos, sin = self._made(torch.cat([torch.arange(20), torch.arange(1000, 1020)]), 1020)
                both = torch.cat([cos, sin]).T  # [columns, positions]
                equal = (both[:, None] == both[None]).all(-1).int().argmax(1)
                self._unique = torch.unique(equal, return_inverse=True)
        return self._unique

    def offset_table(self) -> OffsetTable:
        """Cosines and sines of the next tokens after any token, on the CPU; where `length` does not matter."""
        if self._offset_table is None:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                self._offset_table = rope_offset_table(*self._first_positions(OFFSETS))
        return self._offset_table

    def int16_offset_table(self, D: int) -> Tensor | None:
        """Cosines and sines of D channels for the next tokens after any token, in int16."""
        if D not in self._int16_offset_tables:
            channels = self.channels(D)
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                made = self._first_positions(INT16_OFFSETS)
                self._int16_offset_tables[D] = None if channels is None else int16_rope_offset_table(*made, channels)
        return self._int16_offset_tables[D]

    def _first_positions(self, n: int) -> tuple[Tensor, Tensor]:
        first, _ = self._columns()
        cos, sin = self._made(torch.arange(n), 1)
        return cos[:, first], sin[:, first]

    def of_sequence(self, first: int, n: int, D: int) -> SequenceRope | None:
        """RoPE of positions first to first + n on D channels; None where `apply` does not turn pairs of channels."""
        cos, sin = self.cos_sin(first, n, first + n, torch.device("cpu"))
        unique, _ = self._columns()
        pairs = self.channels(D)
        return None if pairs is None else SequenceRope(cos[:, unique], sin[:, unique], pairs)

    def tables(self, device: torch.device, stepped: bool = False, turned: int = 0) -> list[Tensor]:
        """Tensors that packed keys on a device need, once for all layers. On a CPU, stepped adds `offset_table`; turned
        adds `int16_offset_table` for that many channels, if not 0."""
        kept = [*self._columns()]
        if self.varies:
            return kept
        kept.append(self.table(device))
        if stepped and device.type == "cpu":
            kept += self.offset_table()
        if turned and device.type == "cpu" and (turns := self.int16_offset_table(turned)) is not None:
            kept.append(turns)
        return kept

    def channels(self, D: int) -> Tensor | None:
        """`apply` as pairs of channels: int32 [D, 4], where channel d becomes x[d]·cos[c] + sign·x[partner]·sin[s] with
        row (partner, c, s, sign), and stays where its partner is −1. c and s count the columns that differ, as in the
        table. None where `apply` is not of that form, or takes another number of channels."""
        if D not in self._channels:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                try:
                    self._channels[D] = pairs_of(self._apply, D, *self._columns())
                except RuntimeError:
                    self._channels[D] = None
        return self._channels[D]

    def has_one_angle_per_pair(self, D: int) -> bool:
        """True if both channels of each pair take cosines and sines of one column."""
        if D not in self._one_angle:
            channels = self.channels(D)
            self._one_angle[D] = channels is not None and _is_one_angle(channels.long())
        return self._one_angle[D]

    def native(self, native: ModuleType, table: Tensor, D: int, stepped: bool) -> Any:
        """RoPE of D channels as an object of the C++ extension, one for all pages. table: of positions, or one that
        holds the rows of one page's tokens. stepped: True for rotated means, which
        need `offset_table`; keys need `int16_offset_table`.

        Raises:
            NotTaken: `apply` does not rotate pairs of channels.
        """
        channels = self.channels(D)
        if channels is None:
            raise NotTaken("the RoPE does not rotate pairs of channels")
        if len(table) == 1:
            return native.rope(table=table, channels=channels, offsets=[], int16_offsets=None)
        kept: tuple[Any, Any] = self._natives.get((D, stepped), (None, None))
        before, made = kept
        if before is table:
            try:
                made.check_unmoved()
            except native.Moved:
                before = None
        if before is not table:
            offsets = list(self.offset_table()) if stepped and self._shares_columns(channels) else []
            int16 = None if stepped else self.int16_offset_table(D)
            made = native.rope(table=table, channels=channels, offsets=offsets, int16_offsets=int16)
            self._natives[D, stepped] = table, made
        return made

    @staticmethod
    def _shares_columns(channels: Tensor) -> bool:
        """True if each channel takes cos and sin of one column."""
        return torch.equal(channels[:, 1], channels[:, 2])

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated x [B, H, n, D]; cos and sin [1 or B, n, R], or [B, H, n, R] where heads differ."""
        if cos.dim() == 3:
            return self._apply(x, cos, sin)
        turned = self._apply(x.flatten(0, 1).unsqueeze(1), cos.flatten(0, 1), sin.flatten(0, 1))
        return turned.squeeze(1).unflatten(0, x.shape[:2])

    def invert(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Inverse of `apply`, also where cos and sin carry a factor (YaRN)."""
        squared = cos * cos + sin * sin
        return self.apply(x, cos / squared, -sin / squared)

    def vjp(self, gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Vector-Jacobian product of `apply`: the gradient of its input from that of its output. It is the transpose,
        which differs from the inverse where cos and sin carry a factor (YaRN)."""
        return self.apply(gradient, cos, -sin)


class SequenceRope(NamedTuple):
    """RoPE of the tokens of one sequence, as tensors alone: cos, sin [n, columns that differ], and `Rope.channels`
    [D, 4]."""

    cos: Tensor
    sin: Tensor
    pairs: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotated x [B, H, m·n, D], m such sequences one behind the other."""
        partner, c, s, sign = self.pairs.long().unbind(-1)
        moved = partner >= 0
        cos = torch.where(moved, self.cos[:, c.clamp_min(0)], 1.0)
        sin = torch.where(moved, self.sin[:, s.clamp_min(0)] * sign, 0.0)
        parts = x.unflatten(2, (-1, len(cos)))
        return (parts * cos + parts[..., partner.clamp_min(0)] * sin).flatten(2, 3)


class Angles(NamedTuple):
    """Cosines and sines of the tokens of a segment, by their places in a table.

    rope: the layer's. table float32 [digits, rows, 2, padded columns]: `rope_table`, or `given_table` where a model's
    frequencies change with the length of the sequence. places int32 [1 or B, 1 or H, T or 1]: each token's position, or
    its row in a table of one digit; of consecutive tokens only the first one's. tokens: T.
    """

    rope: Rope
    table: Tensor
    places: Tensor
    tokens: int

    @property
    def is_given(self) -> bool:
        """True if the table holds the tokens' own rows, so that nothing follows from one token for the next."""
        return len(self.table) == 1

    @property
    def consecutive(self) -> bool:
        """True if positions follow one another, so that a kernel may go on from the first one."""
        return not self.is_given and self.places.shape[-1] == 1

    @property
    def is_small(self) -> bool:
        """True if it holds a few numbers beside the table of all layers, whatever the number of tokens."""
        return self.consecutive

    def native(self, native: ModuleType, D: int, stepped: bool) -> tuple[Any, Tensor]:
        """The C++ extension's RoPE of D channels, see `Rope.native`, and places whose last axis is contiguous."""
        return self.rope.native(native, self.table.contiguous(), D, stepped), last_contiguous(self.places)

    def rows(self) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [1 or B, T, padded columns] as the table has them, or [B, H, T, …] where heads differ."""
        places = self.places
        if places.shape[-1] == 1 != self.tokens:
            places = places + torch.arange(self.tokens, dtype=places.dtype, device=places.device)
        return look_up(self.table, places[:, 0] if places.shape[1] == 1 else places)

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """cos and sin float32 [1 or B, T, R] as the model has them, or [B, H, T, R] where heads differ."""
        cos, sin = self.rows()
        columns = self.rope._columns()[1].to(cos.device)
        return cos[..., columns], sin[..., columns]


def _is_one_angle(channels: Tensor) -> bool:
    partner, cos, sin, _ = channels[channels[:, 0] >= 0].unbind(1)
    return torch.equal(cos, sin) and torch.equal(cos, channels[partner, 1])


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
