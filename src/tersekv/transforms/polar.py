"""Recursive polar coordinates (PolarQuant, arXiv 2502.02617, Definition 1 and Algorithm 1).

Level 1 converts neighbouring channels x_{2j}, x_{2j+1} to a radius and an angle. Each further level
does the same with neighbouring radii of the level before. After L levels a vector of D channels is
D/2^L radii and D/2^ℓ angles per level ℓ. Angles of level 1 are in [0, 2π), those above in [0, π/2],
because radii are not negative. The map is a bijection except at zeros (whose angle is 0). Each
radius is the norm of 2^L neighbouring channels.

For a Gaussian or uniformly rotated vector the angles are independent of each other and of the
radii. Level 1 is uniform. Level ℓ ≥ 2 has density ∝ sin^{2^{ℓ−1}−1}(2ψ) (Lemma 2), narrower at each
level.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tersekv.kernels.encode_polar import to_polar as to_polar


def from_polar(directions: Sequence[tuple[Tensor, Tensor]], radii: Tensor, dim: int = -1) -> Tensor:
    """Invert `to_polar` along the axis `dim`, and return x with D elements along it.

    directions: cosines and sines of the angles of levels 1 to L, D/2^ℓ along `dim`.
    radii: D/2^L along `dim`.
    """
    dim = dim % radii.dim()
    for cos, sin in reversed(directions):
        radii = torch.stack([radii * cos, radii * sin], dim + 1).flatten(dim, dim + 1)
    return radii
