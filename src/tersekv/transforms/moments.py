"""Sums over vectors and gradients, from which a codec can be fitted without the vectors."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.weighted_sums import PART_TOKENS

Observes = Literal["loss", "scores"]
WeightedBy = Literal["gradients", "queries"]

PLAIN_SHARE = {"corpus": 0.1, "prompt": 0.5, "scores": 0.0}
"""Share of equal weights in the weights of tokens, by calibration. Score weights are used as they are.

Later queries may read tokens that the observed queries do not. Their scales are thus at least those
of a plain fit times the root of this share. Chosen by divergence and by passkeys
(docs/methods/trellis.md, "Without a corpus").
"""


class TokenLoss(NamedTuple):
    """Loss of errors in a prompt's keys or values: e in token t costs weights_t·Σ_d metric_d·e_d².

    weights: float32 [B, H, T], not negative. metric: float32 [B, H, D], or None for ones; with
    scores a matrix [B, H, D, D].
    """

    weights: Tensor
    metric: Tensor | None = None

    def tokens(self, start: int, stop: int | None = None) -> TokenLoss:
        """Return the loss of tokens `start` to `stop`."""
        return self._replace(weights=self.weights[:, :, start:stop])

    def relative(self, calibration: str) -> TokenLoss:
        """Return weights with mean 1 in each head, of which a share is the same for all tokens.

        calibration: corpus, prompt or scores, see `PLAIN_SHARE`.
        """
        return self._replace(weights=backends.relative_weights(self.weights, PLAIN_SHARE[calibration]))


def score_loss(keys: Tensor, query: Tensor) -> tuple[TokenLoss, TokenLoss]:
    """Return the loss of errors in keys and values by all scores (OSCAR, arXiv 2605.17757).

    An error e in a key costs eᵀ·E[q·qᵀ]·e. A value v of the key k counts with the mean square of its
    scores, kᵀ·E[q·qᵀ]·k.

    keys: float32 [B, H, T, D]. query: float32 [B, H, R, D], all of a KV head.
    """
    form = query.mT @ query / max(1, query.shape[2])
    ones = torch.ones_like(keys[..., 0])
    return TokenLoss(ones, form), TokenLoss((keys @ form * keys).sum(-1).clamp_min(0))


class Moments(NamedTuple):
    """Sums over vectors x [B, H, T, D] and gradients g of the loss with respect to them, float64.

    vectors: their number T. total: Σ x, [B, H, D]. squares: Σ x·xᵀ, [B, H, D, D]. metric: Σ g·gᵀ,
    [B, H, D, D], of which for keys the diagonal; None without gradients. On a prompt, the metric of
    `TokenLoss` times T.
    """

    vectors: int
    total: Tensor
    squares: Tensor
    metric: Tensor | None = None

    @staticmethod
    def of(x: Tensor, gradient: Tensor | None = None, diagonal: bool = False) -> Moments:
        """Return the sums over x [B, H, T, D].

        gradient: with the shape of x; each vector is multiplied by its squared gradient, relative
        to the mean, see `TokenLoss.relative`. diagonal: keep the diagonal of Σ g·gᵀ only, as for
        keys.
        """
        if gradient is None:
            return Moments(x.shape[2], x.sum(2, dtype=torch.float64), _squares(x))
        sums = Moments.weighted(x, TokenLoss(gradient.double().square().sum(-1)).relative("corpus"))
        metric = _squares(gradient)
        return sums._replace(metric=metric.diagonal(dim1=-2, dim2=-1).diag_embed() if diagonal else metric)

    @staticmethod
    def weighted(x: Tensor, loss: TokenLoss) -> Moments:
        """Return the sums over x [B, H, T, D], each vector multiplied by the weight of its token."""
        metric = None if loss.metric is None else x.shape[2] * loss.metric.double()
        total, squares = backends.weighted_sums(x, loss.weights.to(x.dtype))
        return Moments(x.shape[2], total, squares, metric)

    def plus(self, other: Moments) -> Moments:
        """Return the sums over the vectors of both, which have or lack a metric alike."""
        metric = None
        if self.metric is not None and other.metric is not None:
            metric = self.metric + other.metric
        return Moments(self.vectors + other.vectors, self.total + other.total, self.squares + other.squares, metric)

    def covariance(self, mean: Tensor | None) -> Tensor:
        """Return E[(x − mean)·(x − mean)ᵀ], [B, H, D, D]. mean: [B, H, D], or None for zero."""
        squares = self.squares / max(1, self.vectors)
        if mean is None:
            return squares
        mean = mean.double()
        half = (self.total / max(1, self.vectors) - mean / 2).unsqueeze(-1) * mean.unsqueeze(-2)
        return squares.sub_(half).sub_(half.transpose(-1, -2))


def _squares(x: Tensor) -> Tensor:
    parts = (part.double() for part in x.split(PART_TOKENS, 2))
    return sum((part.transpose(-1, -2) @ part for part in parts), _zeros(x))


def _zeros(x: Tensor) -> Tensor:
    B, H, _, D = x.shape
    return x.new_zeros((B, H, D, D), dtype=torch.float64)
