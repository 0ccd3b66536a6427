"""Recursive polar coordinates (PolarQuant, arXiv 2502.02617, Definition 1 and Algorithm 1).

Level 1 turns neighbouring channels x_{2j}, x_{2j+1} into a radius and an angle; each further level does the same with
neighbouring radii of the level before. After L levels a vector of D channels is D/2^L radii and D/2^ℓ angles per level
ℓ. Angles of level 1 lie in [0, 2π), those above in [0, π/2], since radii are not negative. The map is a bijection but
for zeros (whose angle is 0), and 2^L neighbouring channels belong to one radius, their norm.

For a Gaussian or uniformly rotated vector the angles are independent of each other and of the radii; level 1 is
uniform, and level ℓ ≥ 2 has density ∝ sin^{2^{ℓ−1}−1}(2ψ) (Lemma 2), narrower at each level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tersekv.kernels.encode_polar import to_polar as to_polar


def from_polar(directions: Sequence[tuple[Tensor, Tensor]], radii: Tensor, dim: int = -1) -> Tensor:
    """Inverse of `to_polar` along `dim`: cosines and sines of the angles of levels 1 to L (D/2^ℓ along `dim`), and
    radii (D/2^L along `dim`), to x (D along `dim`)."""
    dim = dim % radii.dim()
    for cos, sin in reversed(directions):
        radii = torch.stack([radii * cos, radii * sin], dim + 1).flatten(dim, dim + 1)
    return radii
