"""Attention over one packed segment; keys and values may have different layouts: contract and torch
reference.

Shapes: B batch, H key-value heads, T tokens, R query rows per key-value head (R = G·q, row r = g·q
+ i for grouped head g and query position i), D head dim of keys, Dv of values.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from tersekv.kernels.attend_grid import GridSide
from tersekv.kernels.registry import operator
from tersekv.kernels.softmax import attend_scores


@runtime_checkable
class Packed(Protocol):
    """Packed tokens that can decode themselves. `kind` names the layout. A kernel reads the fields
    that the class of that kind documents (`tersekv.layouts`)."""

    kind: str

    def native(self, native: ModuleType) -> Any:
        """Return the tokens as an object of the C++ extension, see `tersekv.layouts.base.View`."""

    def decode(self) -> Tensor:
        """Decode to x̂, float32 [B, H, T, D]."""


Operand = Tensor | GridSide | Packed
"""Keys or values of a segment: unpacked tokens [B, H, T, D] of any float dtype, a grid, or another
packed layout."""


def native_view(native: ModuleType, operand: Operand) -> Any:
    """Return an operand as an object of the C++ extension."""
    return native.exact(operand) if isinstance(operand, Tensor) else operand.native(native)


def decoded(operand: Operand) -> Tensor:
    """Decode an operand to x̂, float32 [B, H, T, D]."""
    return operand.float() if isinstance(operand, Tensor) else operand.decode()


@operator()
def attend_packed(
    query: Tensor, keys: Operand, values: Operand, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(scaling · q·K̂ᵀ)·V̂ with its log-sum-exp.

    Args:
        query: float32 [B, H, R, D], contiguous.
        keys, values: the segment, of equal T.
        mask: bool [B, q, T], or [B, H, q, T] if heads differ, True where a token is visible; None
            for all. R % q == 0; row r uses mask row r % q.
        scaling: factor on the scores. softcap: s -> softcap·tanh(s/softcap), or None.

    Returns:
        out float32 [B, H, R, Dv] and lse float32 [B, H, R]; a row that sees no token has out 0 and
        lse -inf.
    """
    key, value = decoded(keys), decoded(values)
    return attend_scores(query @ key.transpose(-1, -2), value, mask, scaling, softcap)
