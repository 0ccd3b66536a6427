"""Views of vectors whose constant part was taken off before coding: values' own mean, and keys' mean before RoPE."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.formats.base import Joined, View
from tersekv.transforms.rope import Rope


class Turned(View):
    """One vector per head, as RoPE turns it at every token: RoPE_n(mean). mean: float [1 or B, H, D]; cos, sin:
    [1 or B, T, R] or [B, H, T, R]. consecutive: a token's position is the one before it plus one, and all have the same
    frequencies, so that a kernel need not read all of cos and sin."""

    format = kind = "turned"

    def __init__(self, mean: Tensor, rope: Rope, cos: Tensor, sin: Tensor, consecutive: bool = False) -> None:
        self.mean, self.rope, self.cos, self.sin, self.consecutive = mean, rope, cos, sin, consecutive

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D], B = 1 where all rows have the same."""
        rows, (H, D) = max(len(self.mean), len(self.cos)), self.mean.shape[1:]
        vectors = self.mean.float().unsqueeze(2).expand(rows, H, self.cos.shape[-2], D)
        return self.rope.put(vectors, self.cos, self.sin)


class Shifted(View):
    """Values x̂ = inner + mean. The weights of a softmax add up to one, so the mean is added to the output once. mean:
    float [1 or B, H, D]."""

    kind = "shifted"

    def __init__(self, view: View, mean: Tensor) -> None:
        self._view, self.mean = view, mean
        self.keeps = view.keeps  # type: ignore[misc]
        self.format = f"shifted {view.format}"  # type: ignore[misc]

    @property
    def inner(self) -> View:
        """The view without the mean, in its own basis."""
        return self._view.inner

    def query(self, query: Tensor) -> Tensor:
        """As the inner view takes it; scores also need the mean's."""
        return self._view.query(query)

    def output(self, out: Tensor) -> Tensor:
        """The inner view's, and the mean."""
        return self._view.output(out) + self.mean.unsqueeze(2)

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return self._view.decode() + self.mean.unsqueeze(2)


class Centred(View):
    """Keys x̂_n = inner_n + RoPE_n(mean): q·x̂_n is a product with 2 D channels, those of the inner view's basis and
    those of the turned mean, which takes no bytes per token. Arguments as in `Turned`; shared: cos and sin are parts
    of a table that others hold."""

    kind = "centred"

    def __init__(
        self, view: View, mean: Tensor, rope: Rope, cos: Tensor, sin: Tensor, consecutive: bool = False,
        shared: bool = False,
    ) -> None:  # fmt: skip
        self.keeps = view.keeps and shared  # type: ignore[misc]
        self._view, self._mean = view, Turned(mean, rope, cos, sin, consecutive)
        self._inner = Joined([(view.inner, mean.shape[-1]), (self._mean, mean.shape[-1])])
        self.format = f"centred {view.format}"  # type: ignore[misc]

    @property
    def inner(self) -> View:
        """Both parts side by side."""
        return self._inner

    def query(self, query: Tensor) -> Tensor:
        """What each part is multiplied with."""
        return torch.cat([self._view.query(query), query], dim=-1)

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return self._view.decode() + self._mean.decode()

    def scores(self, query: Tensor) -> Tensor:
        """q·k̂ for query float32 [B, H, R, D]: float32 [B, H, R, T], unscaled."""
        return self._inner.scores(self.query(query))
