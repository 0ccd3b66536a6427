"""A view of vectors that were coded in a basis of their own, which is held in few bits."""

from __future__ import annotations

from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.basis import unpacked_basis
from tersekv.layouts.base import Rotated, View


class InBasis(Rotated):
    """x̂ = Σ_d inner_d·row_d. basis, channels: see `kernels/basis.py`; rows need not be orthogonal. Products are made
    from what is held, so that nothing unpacked stays."""

    unpacks = True

    def __init__(self, view: View, basis: Tensor, channels: Tensor) -> None:
        self._inner, self.basis, self.channels = view, basis, channels
        self.keeps = view.keeps  # type: ignore[misc]
        self.format = f"{view.format} in a basis"  # type: ignore[misc]

    @property
    def rotation(self) -> Tensor:  # type: ignore[override]
        """Rows float32 [1 or B, H, D, D], unpacked."""
        return unpacked_basis(self.basis, self.channels).float()

    def query(self, query: Tensor) -> Tensor:
        """q·row_d for each d."""
        return backends.basis_product(query, self.basis, self.channels, False)

    def output(self, out: Tensor) -> Tensor:
        """Σ_d o_d·row_d."""
        return backends.basis_product(out, self.basis, self.channels, True)
