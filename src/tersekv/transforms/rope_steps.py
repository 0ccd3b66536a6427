"""How RoPE goes on from any token: cosines and sines of the next steps in few terms.

cos(n + m)θ and sin(n + m)θ follow from those of n and the cosines and sines of m steps. Over M steps a pair that turns
slowly is a polynomial of m, so all slow pairs together take as many terms as one polynomial has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 256
"""Tokens that one block of terms serves."""

TERMS = 16
"""Chebyshev polynomials, of degree 0 to 15."""

LARGEST_ERROR = 1e-6
"""Of the cosine or sine of a slow pair, anywhere in a block."""


class Steps(NamedTuple):
    """table float32 [rows, M]: cos mθ of each fast column, then sin mθ of each, then T_0(m) to T_15(m) if there are
    slow columns. matrix float32 [2·slow, TERMS]: in these polynomials, cos mθ of each slow column, then sin mθ of each.
    place int32 [columns]: of a column of cos and sin, which fast one it is, or −1 − which slow one."""

    table: Tensor
    matrix: Tensor
    place: Tensor


def rope_steps(cos: Tensor, sin: Tensor, equal: Tensor) -> Steps:
    """cos, sin float32 [STEPS, columns] of positions 0, 1, …, with whatever factor they carry. equal int64 [columns]:
    of each column the first that is the same."""
    cos, sin = cos.double(), sin.double()
    square = cos[0].square() + sin[0].square()
    turned = torch.stack([cos * cos[0] + sin * sin[0], sin * cos[0] - cos * sin[0]]) / square
    own = (equal == torch.arange(len(equal))).nonzero()[:, 0]
    turned = turned[:, :, own]  # [cos and sin, M, columns]
    at = torch.linspace(-1, 1, STEPS, dtype=torch.float64)
    terms = torch.cos(torch.arange(TERMS) * torch.acos(at)[:, None])
    fitted = torch.linalg.lstsq(terms.expand(2, -1, -1), turned).solution
    slow = (terms @ fitted - turned).abs().amax((0, 1)) <= LARGEST_ERROR
    if 2 * int(slow.sum()) <= TERMS:  # they would take more terms than they save
        slow = torch.zeros_like(slow)
    place = torch.zeros(len(own), dtype=torch.int64)
    place[~slow], place[slow] = torch.arange(int((~slow).sum())), -1 - torch.arange(int(slow.sum()))
    everywhere = torch.zeros(len(equal), dtype=torch.int64)
    everywhere[own] = place
    fast_rows = turned[:, :, ~slow].transpose(1, 2).flatten(0, 1)
    table = torch.cat([fast_rows, terms.T]) if slow.any() else fast_rows
    matrix = fitted[:, :, slow].transpose(1, 2).flatten(0, 1)
    return Steps(table.float().contiguous(), matrix.float().contiguous(), everywhere[equal].to(torch.int32))
