"""View of vectors that were coded in a quantised basis."""

from __future__ import annotations

from torch import Tensor

from tersekv.layouts.base import Mapped, Rotated, View
from tersekv.layouts.linear_map import LinearMap


class InBasis(Rotated):
    """View with x̂ = Σ_d inner_d·row_d. The rows need not be orthogonal.

    Products use the quantised basis directly, so no dequantised copy is kept.

    basis, channels: see `kernels/basis.py`.
    """

    def __init__(self, view: View, basis: Tensor, channels: Tensor) -> None:
        Mapped.__init__(self, view, LinearMap(basis=basis, channels=channels))
