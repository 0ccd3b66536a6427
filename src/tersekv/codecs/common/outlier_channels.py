"""Codecs that give the channels of largest norm, per KV head, a code of their own."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tersekv.codecs.base import Codec, FitsOn
from tersekv.tensors import TensorSpec, plain
from tersekv.transforms.moments import Moments, WeightedBy

if TYPE_CHECKING:
    from typing_extensions import Self


class OutlierChannels(Codec):
    """Base class of codecs whose fit chooses `num_outliers` channels of each head.

    They are those of the largest mean square: over the prompt, or over the corpus of a calibration.
    `fitted["channels"]` is int16 [B, H, n], ascending; [1, H, n] if it is from a corpus.
    """

    takes_moments = True

    if TYPE_CHECKING:
        calibration: Literal["prompt", "corpus"]

    @abstractmethod
    def num_outliers(self, head_dim: int) -> int:
        """Return the number n of channels that `fit` chooses, 0 if it chooses none."""

    @property
    @abstractmethod
    def chooses_channels(self) -> bool:
        """True if the options need fitted channels."""

    @property
    def fits_on(self) -> FitsOn | None:
        """Data that the option `calibration` names, if channels must be chosen."""
        return self.calibration if self.chooses_channels else None

    @property
    def weighted_by(self) -> WeightedBy | None:
        """None, because all tokens count alike."""
        return None

    def of_heads(self, first: int, count: int) -> Self:
        """Return the codec for some heads."""
        own = {name: t[:, first : first + count] for name, t in self.fitted.items()}
        return dataclasses.replace(self, fitted=own)

    def select(self, rows: Tensor) -> Self:
        """Return the codec for these batch rows. Channels from a corpus are shared by all rows."""
        of_all = self.fits_on == "corpus" and all(len(t) == 1 for t in self.fitted.values())
        return self if of_all else super().select(rows)

    def learns(self, B: int, H: int, head_dim: int) -> dict[str, TensorSpec]:
        """Return the specification of the outlier channels."""
        if not self.chooses_channels:
            return {}
        shape = 1 if self.fits_on == "corpus" else B, H, self.num_outliers(head_dim)
        return {"channels": TensorSpec(torch.int16, shape, 0, head_dim - 1, ascending=True)}

    def fit(self, x: Tensor) -> Self:
        """Choose the outlier channels of each head from x [B, H, T, D]."""
        return self._with_largest(x.square().sum(-2)) if self.chooses_channels else self

    def fit_moments(self, moments: Moments) -> Self:
        """Choose the outlier channels of each head from sums over vectors."""
        return self._with_largest(moments.squares.diagonal(dim1=-2, dim2=-1))

    def _with_largest(self, squares: Tensor) -> Self:
        """Return the codec with the channels of the largest sums of squares [B, H, D]."""
        order = squares.argsort(dim=-1, descending=True, stable=True)[..., : self.num_outliers(squares.shape[-1])]
        return dataclasses.replace(self, fitted={"channels": order.sort(-1).values.to(torch.int16)})

    def channels(self, B: int) -> Tensor:
        """Return the outlier channels of B batch rows, int64 [B, H, n].

        All pages share this tensor, which tells kernels that one mapped query is valid for all of
        them.
        """
        if B not in self._channels:
            self._channels[B] = self._expanded(B)
        return self._channels[B]

    @functools.cached_property
    def _channels(self) -> dict[int, Tensor]:
        return {}

    @plain
    def _expanded(self, B: int) -> Tensor:
        return self.fitted["channels"].long().expand(B, -1, -1)
