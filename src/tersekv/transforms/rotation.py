"""Orthogonal rotations, applied to queries and outputs, never to cached vectors.

A rotated vector y = R·x has no outlier channels, because they are spread over all coordinates. Each
coordinate is distributed like one of a uniform point on the sphere, for which codebooks are known
(PolarQuant, arXiv 2502.02617, §3; TurboQuant, arXiv 2504.19874, §3.1).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.tensors import cached_table

RotationKind = Literal["qr", "hadamard"]


@cached_table
def random_rotation(D: int, seed: int | None, kind: RotationKind = "qr", device: str = "cpu") -> Tensor:
    """Return R as float32 [D, D] with R·Rᵀ = I, equal for equal arguments on every CPU and rank.

    qr: uniform (Haar), the Q of a Gaussian matrix with fixed signs.
    hadamard: random signs and a Hadamard matrix, in blocks of the largest power of two that divides
        D, after a random permutation of the channels. Without a seed: the Hadamard matrices alone.
    """
    if kind == "qr":
        assert seed is not None
        generator = torch.Generator().manual_seed(seed * 1_000_003 + D)
        q, r = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))
        return (q * torch.sign(torch.diagonal(r))).T.contiguous().to(device, torch.float32)
    order, signs = hadamard_parts(D, seed, "cpu")
    block = D & -D
    matrix = torch.block_diag(*[hadamard(block)] * (D // block)) * signs.double()
    return matrix[:, torch.argsort(order)].contiguous().to(device, torch.float32)


@cached_table
def hadamard_parts(D: int, seed: int | None, device: str) -> tuple[Tensor, Tensor]:
    """Return the order of channels int32 [D] and the signs float32 [D] of a Hadamard rotation.

    seed: of both; None for the channels' own order and positive signs.
    """
    if seed is None:
        return torch.arange(D, dtype=torch.int32).to(device), torch.ones(D).to(device)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + D)
    signs = torch.randint(0, 2, (D,), generator=generator) * 2 - 1
    order = torch.randperm(D, generator=generator)
    return order.to(device, torch.int32), signs.to(device, torch.float32)


@cached_table
def split_rotation(first: int, D: int, seed: int, kind: RotationKind, device: str) -> Tensor:
    """Return a block-diagonal float32 [D, D] with rotations of the first channels and of the
    others.
    """
    parts = [random_rotation(n, seed, kind, "cpu") for n in (first, D - first)]
    return torch.block_diag(*parts).to(device)


def rotated(x: Tensor, seed: int | None, kind: RotationKind) -> Tensor:
    """Return R·x of `random_rotation`, float32, for x [..., D] of any float dtype.

    The product is computed in float64, so that codes do not depend on how tokens are batched.
    """
    D, device = x.shape[-1], str(x.device)
    matrix = random_rotation(D, seed, kind, device)
    if kind == "hadamard":
        return backends.rotate_hadamard(x, matrix, *hadamard_parts(D, seed, device))
    return backends.rotate_dense(x, matrix)


def hadamard(n: int) -> Tensor:
    """Return Sylvester's Hadamard matrix divided by √n, float64 [n, n].

    n must be a power of two.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / math.sqrt(n)
