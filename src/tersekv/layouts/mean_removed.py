"""Views of vectors coded without their mean. The mean of keys is taken before RoPE."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.layouts.base import Concat, Mapped, View
from tersekv.layouts.linear_map import LinearMap
from tersekv.tensors import last_contiguous
from tersekv.transforms.angles import Angles
from tersekv.transforms.marked_angles import MarkedAngles
from tersekv.transforms.rope import Rope


class RotatedMean(View):
    """One vector per head, rotated by RoPE to each token's position: RoPE_n(mean).

    mean: float [1 or B, H, D].
    angles: RoPE angles of the tokens.
    """

    format = kind = "rotated_mean"

    def __init__(self, mean: Tensor, rope: Rope, angles: Angles | MarkedAngles) -> None:
        self.mean, self.rope, self.angles = mean, rope, angles
        self.keeps = angles.is_small  # type: ignore[misc]

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return self.angles.tokens

    def native(self, native: ModuleType) -> Any:
        rope, places = self.angles.native(native, self.mean.shape[-1], stepped=True)
        marks = self.angles.marks.native if isinstance(self.angles, MarkedAngles) else None
        mean = last_contiguous(self.mean)
        return native.rotated_mean(mean=mean, tokens=self.tokens, rope=rope, places=places, marks=marks)

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]. B is 1 if all batch rows are equal."""
        pairs = self.rope.channels(self.mean.shape[-1])
        if pairs is None:
            cos, sin = self.angles.cos_sin()
            rows, (H, D) = max(len(self.mean), len(cos)), self.mean.shape[1:]
            return self.rope.apply(self.mean.float().unsqueeze(2).expand(rows, H, self.tokens, D), cos, sin)
        mean, cos, across, sin = self._factors(pairs)
        return torch.mul(mean, cos).addcmul_(across, sin)

    def added_to(self, x: Tensor) -> Tensor:
        """Return the sum with x float32 [B, H, T, D]."""
        pairs = self.rope.channels(self.mean.shape[-1])
        if pairs is None:
            return x + self.decode()
        mean, cos, across, sin = self._factors(pairs)
        return x.addcmul(mean, cos).addcmul_(across, sin)

    def removed_from(self, x: Tensor) -> Tensor:
        """Return the difference of x, any floats [B, H, T, D], and this, float32."""
        pairs = self.rope.channels(self.mean.shape[-1])
        if pairs is None:
            return x.float() - self.decode()
        mean, cos, across, sin = self._factors(pairs)
        return backends.without_rotated_mean(x, mean, across, cos, sin)

    def _factors(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a, cos, b and sin of a·cos + b·sin, the rotated mean; a and b are [1 or B, H, 1, D]."""
        mean, (cos, sin) = self.mean.float(), self.angles.by_channel(self.mean.shape[-1])
        partner, _, _, sign = pairs.to(mean.device).long().unbind(-1)
        across = mean[..., partner.clamp_min(0)] * sign
        if cos.dim() == 3:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return mean.unsqueeze(2), cos, across.unsqueeze(2), sin


class Biased(Mapped):
    """Values x̂ = view + mean. mean: float [1 or B, H, D]."""

    kind = "biased"

    def __init__(self, view: View, mean: Tensor) -> None:
        super().__init__(view, view.linear._replace(mean=mean))
        self.keeps = view.keeps  # type: ignore[misc]


class MeanRemoved(View):
    """Keys x̂_n = inner_n + RoPE_n(mean).

    q·x̂_n is a product over 2 D channels: those of the inner view's basis and those of the rotated
    mean. The rotated mean takes no bytes per token.
    """

    kind = "mean_removed"

    def __init__(self, view: View, mean: RotatedMean) -> None:
        self.keeps = view.keeps and mean.keeps  # type: ignore[misc]
        self._view, self._mean = view, mean
        D = mean.mean.shape[-1]
        self._inner = Concat([(view.inner, D), (mean, D)])
        self.format = f"centred {view.format}"  # type: ignore[misc]

    @property
    def inner(self) -> View:
        """View of both parts, with their channels concatenated."""
        return self._inner

    @property
    def linear(self) -> LinearMap:
        """Linear map of the inner view, which also keeps the query for the second part."""
        return self._view.linear._replace(keeps_query=True)

    @property
    def uncoded(self) -> Tensor:
        """Return the rotated mean of each token, float32 [1 or B, H, T, D]."""
        return self._mean.decode()

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]."""
        return self._mean.added_to(self._view.decode())

    def floats(self, dtype: torch.dtype) -> Tensor:
        return self._mean.added_to(self._view.floats(torch.float32)).to(dtype)

    def scores(self, query: Tensor) -> Tensor:
        """Return unscaled q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T]."""
        return self._inner.scores(self.query(query))
