"""What a token policy states: which tokens stay exact, in which type, and when others are packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from tersekv.errors import UserError
from tersekv.formats.exact import DTYPES


@dataclass(frozen=True)
class TokenPolicy:
    """sinks: first tokens kept exact. recent: latest tokens kept exact, at least. exact: their type; "auto" is the
    model's own where it has 16 bits, else fp16. observes: whether the policy looks at queries, so that its prefill
    cannot be shared with other recipes."""

    observes: ClassVar[bool] = False

    sinks: int = 4
    recent: int = 128
    exact: Literal["auto", "bf16", "fp16", "fp32"] = "auto"

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)} is negative; give 0 or more tokens")
        if self.exact != "auto" and self.exact not in DTYPES:
            raise UserError(f"exact={self.exact} is not allowed; choose one of auto, {', '.join(DTYPES)}")

    def exact_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The type of exact tokens for a model that computes in `model_dtype`."""
        if self.exact != "auto":
            return DTYPES[self.exact]
        return model_dtype if model_dtype.itemsize == 2 else torch.float16

    def sink_tokens(self, window: int | None) -> int:
        """First tokens that stay exact in a layer with that sliding window; such a layer forgets them, so it has
        none."""
        return self.sinks if window is None else 0

    def to_pack(self, waiting: int, block: int) -> int:
        """How many of `waiting` exact tokens behind the sinks are to be packed now, a multiple of `block`."""
        return max(0, waiting - self.recent) // block * block

    def options(self) -> dict[str, Any]:
        """The options by name, as in a recipe."""
        return dict(vars(self))
