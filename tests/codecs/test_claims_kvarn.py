"""KVarN (arXiv 2606.03458) against an independent computation, and what its normalisation does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tersekv.codecs.kvarn import KVarN
from tersekv.layouts.base import Side
from tersekv.transforms.sinkhorn import column_scales


def sample(T: int, D: int, seed: int = 0) -> Tensor:
    """Return vectors whose tokens and channels differ in size."""
    g = torch.Generator().manual_seed(seed)
    tokens, channels = torch.randn(T, 1, generator=g).exp(), torch.randn(1, D, generator=g).mul(0.5).exp()
    return (torch.randn(T, D, generator=g) * tokens * channels)[None, None]


def hadamard(D: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < D:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / D**0.5


def imbalance(x: Tensor) -> float:
    columns, rows = x.std(0), x.std(1)
    return float(columns.max() / columns.min() + rows.max() / rows.min())


def sinkhorn(x: Tensor, steps: int) -> Tensor:
    """Return column scales of x [rows, columns], step by step on the matrix itself."""
    rms = x.square().mean().sqrt()
    x, scales = x / rms, torch.ones(x.shape[1], dtype=torch.float64)
    best, least = scales, imbalance(x)
    for _ in range(steps):
        scales, x = scales * x.std(0), x / x.std(0)
        x = x / x.std(1, keepdim=True)
        if imbalance(x) <= least:
            best, least = scales, imbalance(x)
    return best * rms


def by_hand(x: Tensor, side: Side, bits: int, steps: int) -> Tensor:
    """Return the decoded tile of x [T, D] float64, in a layout with ranges along dimension 0."""
    rotation = hadamard(x.shape[1])
    y = x @ rotation.T
    y = y if side == "keys" else y.T  # ranges along dimension 0, factors along dimension 1 of the transpose
    factor = sinkhorn(y.T, steps).half().double()[:, None]
    y = y / factor
    low, high = y.amin(0), y.amax(0)
    scale, low = ((high - low) / (2**bits - 1)).half().double(), low.half().double()
    codes = ((y - low) / scale).round().clamp(0, 2**bits - 1)
    y = factor * (low + scale * codes)
    return (y if side == "keys" else y.T) @ rotation


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize(("bits", "steps"), [(2, 16), (4, 16), (3, 0)])
def test_equal_to_a_computation_by_hand(side: Side, bits: int, steps: int):
    x = torch.cat([sample(128, 64), sample(128, 64, seed=1)], dim=2)
    codec = KVarN(bits, steps=steps, side=side)
    got = codec.decode(codec.encode(x), 64)[0, 0].double()
    wanted = torch.cat([by_hand(tile, side, bits, steps) for tile in x[0, 0].double().split(128)])
    # Once deviations are equal, rounding decides which step counts. Steps differ in the size of all
    # factors, and then a few numbers between two codes are rounded the other way.
    error = (x[0, 0] - wanted).square().mean()
    assert float((got - wanted).square().mean()) < 0.1 * float(error)


def test_deviations_become_equal():
    x = sample(128, 64)[0, 0].double()
    tile = x / column_scales(x, 16)
    tile = tile / tile.std(1, keepdim=True)
    assert imbalance(tile) < 2.01 < 10 < imbalance(x)


def test_scales_of_a_tile_do_not_depend_on_its_size():
    """Factors are relative to the tile, so tiny and huge tokens are normalised alike.

    Sizes are powers of two, which are exact. Others round, and KVarN may then keep another step.
    """
    x = sample(128, 64)
    for size in (2.0**-10, 2.0**10):
        torch.testing.assert_close(column_scales(size * x, 16), size * column_scales(x, 16))


@pytest.mark.parametrize("side", ["keys", "values"])
def test_normalisation_lowers_the_error(side: Side):
    """Tokens whose sizes differ share a range per channel: then normalisation helps keys most."""
    x, errors = sample(1024, 64), {}
    for steps in (0, 16):
        codec = KVarN(steps=steps, side=side)
        off = codec.decode(codec.encode(x), 64) - x
        errors[steps] = float((off.square().sum(-1) / x.square().sum(-1)).mean())
    assert errors[16] < (0.2 if side == "keys" else 1.02) * errors[0]
