"""A view of vectors that were coded in a basis of their own, which is held in few bits."""

from __future__ import annotations

from torch import Tensor

from tersekv.layouts.base import LinearMap, Mapped, Rotated, View


class InBasis(Rotated):
    """x̂ = Σ_d inner_d·row_d. basis, channels: see `kernels/basis.py`; rows need not be orthogonal. Products are made
    from what is held, so that nothing unpacked stays."""

    def __init__(self, view: View, basis: Tensor, channels: Tensor) -> None:
        Mapped.__init__(self, view, LinearMap(basis=basis, channels=channels))
