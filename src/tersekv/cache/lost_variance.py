"""Variance that keys lose by coding, which biases the softmax weights of packed tokens.

Softmax weighs exp(s·q·k). Over many keys that are about normal with covariance C, its mean is
exp(s·q·μ + ½·s²·qᵀCq). Coding changes C to Ĉ, so a packed key gets too little weight by the factor
exp(½·s²·qᵀ(C − Ĉ)q), beside keys that are exact. The sign depends on the codec:

    k̂ is the mean of the keys with its code (trellis, Lloyd-Max):  C − Ĉ =  E[e·eᵀ], weights too small
    k̂ = k + noise, unbiased (rounded integers of few bits, QJL):   C − Ĉ = −E[e·eᵀ], weights too large

The term depends on the query and the KV head, not on the token. So it is added to the log-sum-exp
of all packed tokens, outside the loop over tokens (`kernels/softmax.score_bias`). Only the diagonal
of C − Ĉ is kept, in the components that the codec codes. It is measured on the tokens that are
packed first, and later tokens use the same. docs/recipes.md has the formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.cache.parallel import ContextParallel
from tersekv.layouts.base import View


class LostVariance:
    """Sums over keys and decoded keys, from which the lost variance follows."""

    def __init__(self) -> None:
        self._sums: tuple[Tensor, ...] | None = None

    def add(self, keys: Tensor, view: View, counts: Tensor | None = None) -> None:
        """Add keys [B, H, n, D] as they were cached, and their packed view of n or more tokens.

        counts: bool [B, 1 or H, n], True for tokens that count, for example not padding.
        """
        n, known = keys.shape[2], view.uncoded
        before = keys.float()
        if known is None:
            coded = view.inner.floats(torch.float32)[:, :, :n]
        else:
            coded, before = view.floats(torch.float32)[:, :, :n] - known[:, :, :n], before - known[:, :, :n]
            coded = view.linear.components(coded)
        before = view.linear.components(before)
        weights = before.new_ones((1, 1, n, 1)) if counts is None else counts.unsqueeze(-1).float()
        # the difference of the squares, before it is summed, so that no digits are lost
        each = torch.ones_like(weights), before, coded, (before - coded) * (before + coded)
        sums = [(x * weights).sum(2, dtype=torch.float64) for x in each]
        self._sums = tuple(sums) if self._sums is None else tuple(a + b for a, b in zip(self._sums, sums, strict=True))

    def share(self, processes: ContextParallel, like: Tensor) -> None:
        """Add the sums over the tokens of the other processes. like: keys [B, H, ·, D]."""
        B, H, _, D = like.shape
        sums = self._sums or [like.new_zeros((), dtype=torch.float64)] * 4
        each = processes.gather(torch.stack([x.expand(B, H, D) for x in sums]))
        self._sums = tuple(torch.stack(each).sum(0))

    def value(self) -> Tensor | None:
        """Return the lost variance per component, float32 [B, H, D], negative where coding adds
        variance.

        None without tokens.
        """
        if self._sums is None:
            return None
        count, *sums = self._sums
        before, coded, squares = (x / count.clamp_min(1) for x in sums)
        return (squares - before.square() + coded.square()).float()
