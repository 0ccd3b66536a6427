"""PyramidKV (arXiv 2406.02069): SnapKV with larger budgets in the early layers.

Attention is spread out in the first layers and concentrates on few tokens in the last ones. Budgets
fall linearly over the layers; their total is SnapKV's.

The last layer gets budget/β; the first gets twice the mean minus that (§4). Here the observation
window counts towards the budget. A layer never gets less than the window or more than the prompt.
kvpress instead falls back to SnapKV if the last layer would get less than the window.

Good for: the same as snapkv, where late layers need few tokens.
Bad for: questions that come after the text: what they ask for may be gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tersekv.errors import UserError
from tersekv.policies.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Options of PyramidKV.

    beta: mean budget divided by the last layer's budget.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise UserError(f"beta={self.beta} is not allowed; give 1 (all layers alike) or more")

    def kept(self, tokens: int, layer: int = 0, layers: int = 1) -> int:
        """Return the layer's budget, which falls linearly over the layers."""
        mean = min(float(tokens), self.budget * tokens if self.budget <= 1 else self.budget)
        most = max(mean, tokens - self.window)
        last = min(mean, max(mean / self.beta, 2 * mean - most, self.window))
        first = 2 * mean - last
        step = (first - last) / max(1, layers - 1)
        return min(tokens, max(1, round(first - layer * step if layers > 1 else mean)))


POLICY = PyramidKV
