"""Views of vectors whose constant part was taken off before coding: values' own mean, and keys' mean before RoPE."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.formats.base import Joined, View
from tersekv.formats.roped import Roped
from tersekv.transforms.rope import Rope


class Constant(View):
    """The same vector [B, H, 1, D] at every one of `tokens` tokens."""

    format = kind = "constant"

    def __init__(self, vector: Tensor, tokens: int) -> None:
        B, H, _, D = vector.shape
        self.vectors = vector.expand(B, H, tokens, D)

    @property
    def operand(self) -> Tensor:
        """Unpacked tokens, all at one place."""
        return self.vectors

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        return self.vectors


class Shifted(View):
    """Values x̂ = inner + mean. The weights of a softmax add up to one, so the mean is added to the output once. mean:
    float32 [1 or B, H, D]."""

    kind = "shifted"

    def __init__(self, view: View, mean: Tensor) -> None:
        self._view, self.mean = view, mean
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
    those of the turned mean, which takes no bytes per token. mean: float32 [1 or B, H, D]; cos, sin: [1 or B, T, R] or
    [B, H, T, R]."""

    kind = "centred"
    keeps = False

    def __init__(self, view: View, mean: Tensor, rope: Rope, cos: Tensor, sin: Tensor, batch: int) -> None:
        D, tokens = mean.shape[-1], cos.shape[-2]
        self._view = view
        self._mean = Roped(Constant(mean.expand(batch, -1, -1).unsqueeze(2), tokens), rope, cos, sin)
        self._inner = Joined([(view.inner, D), (self._mean, D)])
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
