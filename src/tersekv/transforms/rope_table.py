"""Cosines and sines of any position from a table of 256 rows.

A rotation by the angle p·θ is the product of the rotations by the parts of p. In base 64, p = Σ
d_l·64^l, so it needs four rows of the table, one per digit, and three complex products
(angle addition). The table's size does not depend on the number of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

DIGIT_BITS = 6
BASE = 1 << DIGIT_BITS
DIGITS = 4
MAX_POSITION = BASE**DIGITS - 1
LANES = 16
"""Columns of the table are padded to a multiple of this, so that kernels read whole vectors."""


def table_positions() -> Tensor:
    """Return the positions of the table's rows, int64 [DIGITS · BASE]: each digit times its power
    of 64.
    """
    return (torch.arange(BASE, device="cpu") * BASE ** torch.arange(DIGITS, device="cpu")[:, None]).flatten()


def relative(cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotations from the first row to each row, float64 [2, rows, columns] (cosines, sines).

    cos, sin: [rows, columns], which may have a common factor (YaRN).
    """
    cos, sin = cos.double(), sin.double()
    square = cos[0].square() + sin[0].square()
    return torch.stack([cos * cos[0] + sin * sin[0], sin * cos[0] - cos * sin[0]]) / square


def padded_columns(columns: int) -> int:
    """Return the number of table columns for this number of channel pairs."""
    return -(-columns // LANES) * LANES


def rope_table(cos: Tensor, sin: Tensor) -> Tensor:
    """Return the table float32 [DIGITS, BASE, 2, padded columns].

    A common factor of cos and sin is included in the rows of the last digit only.

    cos, sin: [DIGITS · BASE, columns] of `table_positions()`.
    """
    table = relative(cos, sin).unflatten(1, (DIGITS, BASE))  # [2, DIGITS, BASE, columns]
    c, s = table[:, -1]
    first_cos, first_sin = cos[0].double(), sin[0].double()
    table[:, -1] = torch.stack([c * first_cos - s * first_sin, s * first_cos + c * first_sin])
    return _padded(table.permute(1, 2, 0, 3))


def given_table(cos: Tensor, sin: Tensor) -> Tensor:
    """Return a table of one digit, float32 [1, rows, 2, padded columns], whose rows are cos and
    sin.

    cos, sin: [rows, columns].
    """
    return _padded(torch.stack([cos, sin], 1)[None])


def _padded(table: Tensor) -> Tensor:
    columns = table.shape[-1]
    return torch.nn.functional.pad(table.float(), (0, padded_columns(columns) - columns)).contiguous()


def look_up(table: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin float32 [*places.shape, padded columns].

    places: positions, if the table has several digits; negative ones rotate in the other direction.
        Rows, if it has one digit.
    """
    if len(table) == 1:
        rows = table[0][places.clamp(0, table.shape[1] - 1).long()]
        return rows[..., 0, :], rows[..., 1, :]
    size = places.abs().long()
    rows = table[-1][size >> DIGIT_BITS * (DIGITS - 1) & BASE - 1]
    cos, sin = rows[..., 0, :], rows[..., 1, :]
    for digit in range(DIGITS - 2, -1, -1):
        rows = table[digit][size >> DIGIT_BITS * digit & BASE - 1]
        c, s = rows[..., 0, :], rows[..., 1, :]
        cos, sin = cos * c - sin * s, sin * c + cos * s
    return cos, torch.where(places.unsqueeze(-1) < 0, -sin, sin)
