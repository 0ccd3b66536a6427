"""RoPE angles of the tokens that a segment holds."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.tensors import last_contiguous
from tersekv.transforms.rope_table import look_up

Rope = Any
"""`transforms/rope.Rope`, which makes angles and so cannot be imported here."""


class Angles(NamedTuple):
    """Cosines and sines of a segment's tokens, as indices into a table.

    rope: RoPE of the layer.
    table: float32 [digits, rows, 2, padded columns], a `rope_table`, or a `given_table` if
        frequencies change with the sequence length.
    places: int32 [1 or B, 1 or H, T or 1], each token's position, or its row in a table of one
        digit. For consecutive tokens only the first one's.
    tokens: T.
    kept: what `by_channel` has returned, by D, of angles that several layers read; or None.
    """

    rope: Rope
    table: Tensor
    places: Tensor
    tokens: int
    kept: dict[int, tuple[Tensor, Tensor]] | None = None

    @property
    def is_given(self) -> bool:
        """True if the table holds the tokens' own rows.

        One token's angle then does not give the next one's.
        """
        return len(self.table) == 1

    @property
    def consecutive(self) -> bool:
        """True if positions are consecutive, so that the first one gives all."""
        return not self.is_given and self.places.shape[-1] == 1

    @property
    def is_small(self) -> bool:
        """True if the object needs little memory next to the shared table, for any number of
        tokens.
        """
        return self.consecutive

    def native(self, native: ModuleType, D: int, stepped: bool) -> tuple[Any, Tensor]:
        """Return the native RoPE of D channels, see `Rope.native`, and contiguous places."""
        return self.rope.native(native, self.table.contiguous(), D, stepped), last_contiguous(self.places)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin float32 [1 or B, T, padded columns] as in the table, or [B, H, T, …]
        if heads differ.
        """
        places = self.places
        if places.shape[-1] == 1 != self.tokens:
            places = places + torch.arange(self.tokens, dtype=places.dtype, device=places.device)
        return look_up(self.table, places[:, 0] if places.shape[1] == 1 else places)

    def by_channel(self, D: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin float32 of each channel, [1 or B, T, D], or [B, H, T, D] if heads differ: 1 and 0 for
        channels that are not rotated. Only for RoPE that has `Rope.channels`.
        """
        if self.kept is not None:
            if D not in self.kept:
                self.kept[D] = self._by_channel(D)
            return self.kept[D]
        if not self.consecutive or self.places.numel() > 1 or not self.places.is_cpu:
            return self._by_channel(D)
        kept, key = self.rope._kept, (int(self.places), self.tokens, D)
        if (found := kept.get(key)) is None:
            found = self._by_channel(D)
            self.rope._keep_between_layers(key, found)
        return found

    def of_pairs(self, D: int) -> PairAngles | None:
        """Return the angles of D channels if RoPE rotates pairs of them, each by one angle, in all heads alike."""
        if self.places.shape[1] != 1 or not self.rope.has_one_angle_per_pair(D):
            return None
        cos, sin = self.by_channel(D)
        return PairAngles(cos, sin, cos[:, :1].square() + sin[:, :1].square())

    def _by_channel(self, D: int) -> tuple[Tensor, Tensor]:
        channels = self.rope.channels(D)
        assert channels is not None
        partner, c, s, _ = channels.to(self.places.device).long().unbind(-1)
        cos, sin = self.rows()
        cos, sin = cos[..., c.clamp_min(0)], sin[..., s.clamp_min(0)]
        if bool((moved := partner >= 0).all()):
            return cos, sin
        return torch.where(moved, cos, 1.0), torch.where(moved, sin, 0.0)

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Return cos and sin float32 [1 or B, T, R] as in the model, or [B, H, T, R] if heads
        differ.
        """
        cos, sin = self.rows()
        columns = self.rope._columns()[1].to(cos.device)
        return cos[..., columns], sin[..., columns]


class PairAngles(NamedTuple):
    """Cosines and sines of each channel, [1 or B, T, D], and the squared factor by which RoPE lengthens its pair at
    all tokens, [1 or B, 1, D]."""

    cos: Tensor
    sin: Tensor
    squared: Tensor
