"""Views of vectors whose constant part was taken off before coding: values' own mean, and keys' mean before RoPE."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tersekv.formats.base import Joined, View
from tersekv.transforms.rope import Rope
from tersekv.transforms.rope_steps import STEPS


class Turned(View):
    """One vector per head, as RoPE turns it at every token: RoPE_n(mean). mean: float [1 or B, H, D]; cos, sin:
    [1 or B, T, R] or [B, H, T, R]. consecutive: a token's position is the one before it plus one, and all have the same
    frequencies, so that a kernel need not read all of cos and sin."""

    format = kind = "turned"

    def __init__(self, mean: Tensor, rope: Rope, cos: Tensor, sin: Tensor, consecutive: bool = False) -> None:
        self.mean, self.rope, self.consecutive = mean, rope, consecutive
        self._cos_sin = cos, sin

    @property
    def tokens(self) -> int:
        """T."""
        return self._cos_sin[0].shape[-2]

    @property
    def cos(self) -> Tensor:
        """See above."""
        return self.cos_sin()[0]

    @property
    def sin(self) -> Tensor:
        """See above."""
        return self.cos_sin()[1]

    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Of all tokens."""
        return self._cos_sin

    def begins(self) -> tuple[Tensor, Tensor]:
        """cos and sin of every `STEPS`-th token, from the first on; of consecutive ones."""
        cos, sin = self._cos_sin
        if cos.shape != sin.shape:
            raise ValueError(f"cos and sin: expected one shape, got {list(cos.shape)} and {list(sin.shape)}")
        return cos[..., ::STEPS, :], sin[..., ::STEPS, :]

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D], B = 1 where all rows have the same."""
        cos, sin = self.cos_sin()
        rows, (H, D) = max(len(self.mean), len(cos)), self.mean.shape[1:]
        return self.rope.put(self.mean.float().unsqueeze(2).expand(rows, H, self.tokens, D), cos, sin)


class TurnedRows(Turned):
    """Of rows that begin at positions of their own. cos and sin are made where all of them are asked for; begins: see
    `Turned.begins`, made when first asked for."""

    def __init__(
        self, mean: Tensor, rope: Rope, tokens: int, cos_sin: Callable[[], tuple[Tensor, Tensor]],
        begins: Callable[[], tuple[Tensor, Tensor]],
    ) -> None:  # fmt: skip
        self.mean, self.rope, self.consecutive, self._tokens = mean, rope, True, tokens
        self.cos_sin, self.begins = cos_sin, begins  # type: ignore[method-assign]

    @property
    def tokens(self) -> int:
        """T."""
        return self._tokens


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
    those of the turned mean, which takes no bytes per token. shared: its cos and sin are parts of a table that others
    hold."""

    kind = "centred"

    def __init__(self, view: View, mean: Turned, shared: bool = False) -> None:
        self.keeps = view.keeps and shared  # type: ignore[misc]
        self._view, self._mean = view, mean
        D = mean.mean.shape[-1]
        self._inner = Joined([(view.inner, D), (mean, D)])
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
