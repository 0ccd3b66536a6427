"""PyramidKV (arXiv 2406.02069): SnapKV with more tokens in the first layers, where attention is spread, and fewer in
the last ones, where it gathers on a few; budgets fall evenly from layer to layer and have SnapKV's total.

The last layer gets budget/β and the first twice the mean less that (§4). Ours counts the observation
window within the budget, and never gives a layer less than it or more than the prompt. kvpress gives up the pyramid
altogether (as SnapKV) where the last layer would get less than the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from tersekv.errors import UserError
from tersekv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """beta: how many times less than the mean the last layer gets."""

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise UserError(f"beta={self.beta} is not allowed; give 1 (all layers alike) or more")

    def kept(self, tokens: int, layer: int = 0, layers: int = 1) -> int:
        """Falls evenly over the layers."""
        mean = min(float(tokens), self.budget * tokens if self.budget <= 1 else self.budget)
        most = max(mean, tokens - self.window)
        last = min(mean, max(mean / self.beta, 2 * mean - most, self.window))
        first = 2 * mean - last
        step = (first - last) / max(1, layers - 1)
        return min(tokens, max(1, round(first - layer * step if layers > 1 else mean)))


POLICY = PyramidKV
