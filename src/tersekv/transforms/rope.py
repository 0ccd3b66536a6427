"""Rotary position embeddings (RoPE), removed before coding and applied on reading.

RoPE is from RoFormer (arXiv 2104.09864). Before RoPE the ranges and outliers of a key's channels
are constant over the sequence. RoPE rotates pairs of channels by an angle that depends on the
position, and spreads them (KVQuant, arXiv 2401.18079, §3.2). RoPE is orthogonal up to a factor, so
it can be removed from the keys that a cache receives. The model's own code defines it, with all
rope types, partial rotation and layouts. Removing and applying it cancel in every case.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.kernels.registry import NotTaken
from tersekv.transforms.angles import Angles
from tersekv.transforms.rope_offsets import (
    INT16_OFFSETS,
    OFFSETS,
    OffsetTable,
    int16_rope_offset_table,
    rope_offset_table,
)
from tersekv.transforms.rope_pairs import Apply, pairs_of
from tersekv.transforms.rope_table import MAX_POSITION, given_table, rope_table, table_positions

CosSin = Callable[[Tensor, int], tuple[Tensor, Tensor]]
PROPORTIONAL = 0.02
"""Tolerance for cosines at position 70,000. float32 rounds angles by up to 0.004 per digit."""


MOST_LENGTHS, MOST_FREQUENCIES = 64, 4
"""Most lengths whose frequencies a `Rope` that varies knows, and most frequencies that it keeps a `Rope` for."""

KEPT_ELEMENTS = 1 << 21
"""Most elements of cosines and sines that a `Rope` keeps for the next layer, which asks for the same tokens."""


class Rope:
    """RoPE of one layer.

    cos_sin: function (positions int64 [n], length) that returns cos and sin [n, R] as the model
        computes them. `length` is the number of tokens of the sequence so far. It matters if
        frequencies change with it: dynamic NTK, LongRoPE.
    apply: function (x, cos, sin) that rotates x [B, H, n, D] by cos and sin [1 or B, n, R], linear
        in them.
    varies: True if `length` matters, or if a position's angle is not proportional to it. Otherwise
        cosines come from a table of 256 rows (`rope_table.py`), which equals the model's up to
        float32 rounding of its angles. So they do where `at_length` does not vary. Else they come
        from the model for each segment.
    """

    def __init__(self, cos_sin: CosSin, apply: Apply, varies: bool = False) -> None:
        self._cos_sin, self._apply, self.varies = cos_sin, apply, varies
        self._tables: dict[torch.device, Tensor] = {}
        self._unique: tuple[Tensor, Tensor] | None = None
        self._channels: dict[int, Tensor | None] = {}
        self._one_angle: dict[int, bool] = {}
        self._offset_table: OffsetTable | None = None
        self._int16_offset_tables: dict[int, Tensor | None] = {}
        # by first position, tokens, and channels or, if it varies, length
        self._kept: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self._natives: dict[tuple[int, bool], tuple[Tensor, Any]] = {}  # native object and the table it was built from
        self._lengths: dict[int, bytes] = {}
        self._at: dict[bytes, Rope] = {}  # by frequencies

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without native objects and kept cosines; copies build their own."""
        return self.__dict__ | {"_natives": {}, "_kept": {}, "_at": {}}

    def forget(self) -> None:
        """Free the cosines and sines that are kept between layers."""
        self._kept.clear()
        for rope in list(self._at.values()):
            rope.forget()

    def frequencies(self, length: int) -> bytes:
        """Return what is equal for two lengths of the sequence exactly if their frequencies are."""
        if not self.varies:
            return b""
        if (known := self._lengths.get(length)) is None:
            known = torch.cat(self._made(torch.ones(1, dtype=torch.int64, device="cpu"), length)).numpy().tobytes()
            _keep(self._lengths, length, known, MOST_LENGTHS)
        return known

    def at_length(self, length: int) -> Rope:
        """Return the RoPE of a sequence of this length, one object for all lengths with the same frequencies.

        It varies only if a position's angle is not proportional to it.
        """
        if not self.varies:
            return self
        known = self.frequencies(length)
        if (rope := self._at.get(known)) is None:
            rope = Rope(lambda positions, _: self._cos_sin(positions, length), self._apply)
            rope._unique, rope._channels = self._columns(), self._channels
            at = torch.tensor([1, length // 2, max(length, 1) - 1], device="cpu")
            rope.varies = not rope.is_proportional(at, self, length)
            _keep(self._at, known, rope, MOST_FREQUENCIES)
        return rope

    def angles(self, first: int, n: int, padding: Tensor | None = None, device: torch.device | str = "cpu") -> Angles:
        """Return the angles of n tokens from position `first` on, for RoPE that does not vary.

        padding: int64 [B], subtracted from the positions of each batch row. Negative positions
            (padding) are allowed.
        """
        self._check_reach(first + n)
        places = torch.tensor([first], device=device) - (0 if padding is None else padding.to(device))
        return Angles(self, self.table(places.device), places.to(torch.int32).view(-1, 1, 1), n)

    def angles_at(self, positions: Tensor) -> Angles:
        """Return the angles at positions int [T], [B, T] or [B, H, T], for RoPE that does not
        vary.
        """
        if positions.is_cpu and positions.numel():  # except on a CPU, a check would synchronise with the device
            self._check_reach(int(positions.max()) + 1)
        shape = (1, 1) if positions.dim() == 1 else (len(positions), 1) if positions.dim() == 2 else positions.shape[:2]
        places = positions.to(torch.int32).reshape(*shape, -1)
        return Angles(self, self.table(places.device), places, positions.shape[-1])

    def given(self, cos: Tensor, sin: Tensor) -> Angles:
        """Return the angles of tokens whose cos and sin [1 or B, T, R] are given."""
        B, T, _ = cos.shape
        first = self._columns()[0].to(cos.device)
        table = given_table(*(x[..., first].flatten(0, 1) for x in (cos, sin)))
        places = torch.arange(B, dtype=torch.int32, device=cos.device) * T
        return Angles(self, table, places.view(-1, 1, 1), T)

    def cos_sin(self, first: int, n: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin float32 [n, R] of positions first to first + n.

        They may be negative (padding).
        """
        if not self.varies:
            cos, sin = self.angles(first, n, device=device).cos_sin()
            return cos[0], sin[0]
        found = self._kept.get((first, n, length))
        if found is None:
            found = self._made(torch.arange(first, first + n, device="cpu"), length)
            self._keep_between_layers((first, n, length), found)
        cos, sin = found
        return cos.to(device), sin.to(device)

    def _keep_between_layers(self, key: tuple[int, int, int], made: tuple[Tensor, Tensor]) -> None:
        """Keep cosines and sines for the next layers, if there is room."""
        if sum(2 * cos.numel() for cos, _ in list(self._kept.values())) + 2 * made[0].numel() <= KEPT_ELEMENTS:
            self._kept[key] = made

    @staticmethod
    def _check_reach(end: int) -> None:
        if end > MAX_POSITION + 1:
            raise UserError(f"a token at position {end - 1:,} was given; positions up to {MAX_POSITION:,} are allowed")

    def table(self, device: torch.device) -> Tensor:
        """Return the table of `rope_table.py`, one per device for all layers with this RoPE."""
        if device not in self._tables:
            first, _ = self._columns()
            made = rope_table(*(x[:, first] for x in self._made(table_positions(), self._longest)))
            self._tables[device] = made.to(device)
        return self._tables[device]

    def is_proportional(self, at: Tensor | None = None, of: Rope | None = None, length: int = 1) -> bool:
        """True if angles are proportional to positions, up to float32 rounding.

        at: positions that are compared, by default some up to 70,000. of: RoPE that has the right angles for a sequence
            of this length, by default this one.
        """
        positions = torch.tensor([1, 77, 4097, 70_000], device="cpu") if at is None else at
        ours, theirs = self.angles_at(positions).cos_sin(), (of or self)._made(positions, length)
        size = float(torch.hypot(*theirs).amax())
        return all(torch.allclose(x[0], y, rtol=0, atol=PROPORTIONAL * size) for x, y in zip(ours, theirs, strict=True))

    @property
    def _longest(self) -> int:
        """Length whose frequencies a table has: any, or that of the longest text if it matters."""
        return MAX_POSITION if self.varies else 1

    def _made(self, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            cos, sin = self._cos_sin(positions, length)
            return cos.float().cpu(), sin.float().cpu()

    def _columns(self) -> tuple[Tensor, Tensor]:
        """Return the distinct columns of the model's cos and sin, int64 [unique].

        The second tensor, int64 [R], is the index of each column among them. Columns that agree at
        40 positions count as equal.
        """
        if self._unique is None:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                cos, sin = self._made(torch.cat([torch.arange(20), torch.arange(1000, 1020)]), 1020)
                both = torch.cat([cos, sin]).T  # [columns, positions]
                equal = (both[:, None] == both[None]).all(-1).int().argmax(1)
                self._unique = torch.unique(equal, return_inverse=True)
        return self._unique

    def offset_table(self) -> OffsetTable:
        """Return cosines and sines for the tokens after any token, for RoPE that does not vary."""
        if self._offset_table is None:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                self._offset_table = rope_offset_table(*self._first_positions(OFFSETS))
        return self._offset_table

    def int16_offset_table(self, D: int) -> Tensor | None:
        """Return cosines and sines of D channels for the tokens after any token, in int16.

        None if channels d and d + D/2 are not pairs with one angle.
        """
        if D not in self._int16_offset_tables:
            channels = self.channels(D)
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                made = self._first_positions(INT16_OFFSETS)
                self._int16_offset_tables[D] = None if channels is None else int16_rope_offset_table(*made, channels)
        return self._int16_offset_tables[D]

    def _first_positions(self, n: int) -> tuple[Tensor, Tensor]:
        first, _ = self._columns()
        cos, sin = self._made(torch.arange(n, device="cpu"), self._longest)
        return cos[:, first], sin[:, first]

    def tables(self, device: torch.device, stepped: bool = False, int16_channels: int = 0) -> list[Tensor]:
        """Return the tensors that packed keys on a device need, once for all layers.

        stepped: add `offset_table` on a CPU.
        int16_channels: add `int16_offset_table` for this number of channels on a CPU, if not 0.
        """
        kept = [*self._columns()]
        if self.varies:  # these share the columns
            return kept + [t for of in list(self._at.values()) for t in of.tables(device, stepped, int16_channels)[2:]]
        kept.append(self.table(device))
        if stepped and device.type == "cpu":
            kept += self.offset_table()
        if int16_channels and device.type == "cpu" and (offsets := self.int16_offset_table(int16_channels)) is not None:
            kept.append(offsets)
        return kept

    def channels(self, D: int) -> Tensor | None:
        """Return `apply` as pairs of channels, int32 [D, 4].

        Row d is (partner, c, s, sign): channel d becomes x[d]·cos[c] + sign·x[partner]·sin[s]. It
        is unchanged if its partner is −1. c and s are indices of distinct columns, as in the table.
        None if `apply` has another form or takes another number of channels.
        """
        if D not in self._channels:
            with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
                try:
                    self._channels[D] = pairs_of(self._apply, D, *self._columns())
                except RuntimeError:
                    self._channels[D] = None
        return self._channels[D]

    def has_one_angle_per_pair(self, D: int) -> bool:
        """True if both channels of each pair use cosines and sines of one column."""
        if D not in self._one_angle:
            channels = self.channels(D)
            self._one_angle[D] = channels is not None and _is_one_angle(channels.long())
        return self._one_angle[D]

    def native(self, native: ModuleType, table: Tensor, D: int, stepped: bool) -> Any:
        """Return RoPE of D channels as an object of the C++ extension, shared by all pages.

        table: of positions, or one with the rows of one page's tokens.
        stepped: True for rotated means, which need `offset_table`. Keys need `int16_offset_table`.

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
        """True if each channel uses cos and sin of the same column."""
        return torch.equal(channels[:, 1], channels[:, 2])

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [B, H, n, D]. cos, sin: [1 or B, n, R], or [B, H, n, R] if heads differ."""
        if cos.dim() == 3:
            return self._apply(x, cos, sin)
        rotated = self._apply(x.flatten(0, 1).unsqueeze(1), cos.flatten(0, 1), sin.flatten(0, 1))
        return rotated.squeeze(1).unflatten(0, x.shape[:2])

    def invert(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Invert `apply`, also if cos and sin have a factor (YaRN)."""
        squared = cos * cos + sin * sin
        return self.apply(x, cos / squared, -sin / squared)

    def vjp(self, gradient: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the vector-Jacobian product of `apply`, which maps output to input gradients.

        This is the transpose, which differs from the inverse if cos and sin have a factor (YaRN).
        """
        return self.apply(gradient, cos, -sin)


def _keep(known: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Add a value under a new key, in place of the oldest one if there are `most`."""
    if len(known) >= most:
        known.pop(next(iter(list(known)), None), None)
    known[key] = value


def _is_one_angle(channels: Tensor) -> bool:
    partner, cos, sin, _ = channels[channels[:, 0] >= 0].unbind(1)
    return torch.equal(cos, sin) and torch.equal(cos, channels[partner, 1])


def standard_rope(R: int, theta: float = 10_000.0) -> Rope:
    """Return Llama's RoPE on the first R channels: frequencies θ^(−2i/R), channel i paired with i +
    R/2.
    """
    frequency = theta ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)

    def cos_sin(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        angle = positions.double()[:, None] * torch.cat([frequency, frequency])
        return angle.cos(), angle.sin()

    def apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x[..., :R].chunk(2, dim=-1)
        rotated = x[..., :R] * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
        return torch.cat([rotated, x[..., R:]], dim=-1)

    return Rope(cos_sin, apply)


def _still(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    return torch.ones(len(positions), 1), torch.zeros(len(positions), 1)


NO_ROPE = Rope(_still, lambda x, *_: x)
"""RoPE of models whose keys do not contain positions."""
