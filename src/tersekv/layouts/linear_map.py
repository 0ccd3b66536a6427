"""Linear maps from coded vectors to the vectors that were given to a codec."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.basis import inverses, unpacked_basis


class LinearMap(NamedTuple):
    """Linear map from coded inner vectors to the vectors x̂ = A·inner + mean.

    Aᵀ, whose row d is the contribution of component d, has one of three forms. It is `rotation`,
    float32 [D, D] or [B, H, D, D]; or quantised as `basis` and `channels` (`kernels/basis.py`); or
    the identity.

    mean: float [1 or B, H, D] or None. It is added to an output once, because softmax weights sum
        to one.
    keeps_query: inner vectors have the channels of the mapped query, followed by those of the query
        itself.
    rest: number of channels after those of A, which the map leaves as they are.
    """

    rotation: Tensor | None = None
    basis: Tensor | None = None
    channels: Tensor | None = None
    mean: Tensor | None = None
    keeps_query: bool = False
    rest: int = 0

    @property
    def rows(self) -> Tensor:
        """Return Aᵀ as float32 [D, D] or [1 or B, H, D, D]."""
        if self.basis is None:
            assert self.rotation is not None
            return self.rotation
        assert self.channels is not None
        return unpacked_basis(self.basis, self.channels).float()

    def query(self, query: Tensor) -> Tensor:
        """Return Aᵀ·q for queries float32 [B, H, R, D], followed by q itself if `keeps_query`."""
        out = self._product(query, combine=False)
        return torch.cat([out, query], dim=-1) if self.keeps_query else out

    def components(self, x: Tensor) -> Tensor:
        """Return A⁻¹·x, the inner vectors of x float32 [B, H, T, D], without the mean."""
        if self.basis is not None:
            assert self.channels is not None
            return backends.basis_components(x, self.basis, self.channels)
        if self.rotation is None:
            return x
        return x @ inverses(self.rows)[0]

    def output(self, out: Tensor) -> Tensor:
        """Return A·o + mean for weighted means of inner vectors, float32 [B, H, R, D]."""
        out = self._product(out, combine=True)
        return out if self.mean is None else out + self.mean.unsqueeze(2)

    def _product(self, x: Tensor, combine: bool) -> Tensor:
        if self.rest:
            x, rest = x.split([x.shape[-1] - self.rest, self.rest], dim=-1)
            return torch.cat([self._replace(rest=0)._product(x, combine), rest], dim=-1)
        if self.basis is not None:
            assert self.channels is not None
            return backends.basis_product(x, self.basis, self.channels, combine)
        if self.rotation is None:
            return x
        return torch.matmul(x, self.rotation if combine else self.rotation.transpose(-1, -2))


IDENTITY = LinearMap()
