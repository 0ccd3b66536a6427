"""View of keys that were coded before RoPE. RoPE is applied as they are read."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels import backends
from tersekv.kernels.attend_packed import Operand, native_view
from tersekv.kernels.registry import NotTaken
from tersekv.layouts.base import View
from tersekv.transforms.angles import Angles
from tersekv.transforms.marked_angles import MarkedAngles
from tersekv.transforms.rope import Rope


class Roped(View):
    """View with x̂ = RoPE(inner), applied inside the loop over tokens.

    angles: RoPE angles of the view's tokens.
    """

    kind = "roped"

    def __init__(self, view: View, rope: Rope, angles: Angles | MarkedAngles) -> None:
        # kernels get a dequantised copy of a quantised basis, which must not be cached
        self.keeps = view.keeps and angles.is_small and view.linear.basis is None  # type: ignore[misc]
        self.before, self.rope, self.angles = view, rope, angles
        self.format = f"roped {view.format}"  # type: ignore[misc]

    def native(self, native: ModuleType) -> Any:
        before = self.before.native(native) if self.before.kind == "rotated" else native_view(native, self._operand)
        rope, places = self.angles.native(native, before.head_dim, stepped=False)
        marks = self.angles.marks.native if isinstance(self.angles, MarkedAngles) else None
        return native.roped(before, rope, places, marks)

    @property
    def _operand(self) -> Operand:
        if self.before.inner is not self.before:
            raise NotTaken(f"the C++ kernels do not apply RoPE to {self.before.format}")
        return self.before.operand

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]."""
        return self.rope.apply(self.before.decode(), *self.angles.cos_sin())

    def floats(self, dtype: torch.dtype) -> Tensor:
        if (found := backends.decode.direct(self.operand, dtype)) is not None:
            return found
        return self.rope.apply(self.before.floats(torch.float32), *self.angles.cos_sin()).to(dtype)
