"""What a token policy states: which tokens stay exact, in which type, when others are packed, and which are dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.layouts.exact import DTYPES

Evicts = Literal["never", "block", "step"]


@dataclass(frozen=True)
class TokenPolicy:
    """sinks: first tokens kept exact. recent: latest tokens kept exact, at least. exact: their type; "auto" is the
    model's own where it has 16 bits, else fp16. observes: whether the policy looks at queries. drops:
    whether it keeps only some of the tokens (`Selection`)."""

    observes: ClassVar[bool] = False
    drops: ClassVar[bool] = False

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

    def first_packing(self, window: int | None) -> int:
        """Tokens that a layer with that sliding window has seen before any is packed."""
        return 0

    def to_pack(self, waiting: int, block: int, seen: int, window: int | None) -> int:
        """Number of tokens to pack now, a multiple of `block`, when a layer has seen `seen` tokens and `waiting` of
        them are exact and no sinks. It depends on these counts alone, so that chunks of a prompt pack the same."""
        return 0 if seen < self.first_packing(window) else max(0, waiting - self.recent) // block * block

    def options(self) -> dict[str, Any]:
        """The options by name, as in a recipe."""
        return dict(vars(self))


class Candidates(NamedTuple):
    """Tokens to choose from, T for each KV head.

    votes: float32 [B, H, T], attention weights that observed queries gave each token, summed over queries and averaged
    over the query heads of the KV head. positions: int [B, H, T], −1 where there is no token. num_tokens: so far.
    room: int64 [B], how many of these may stay. always: bool [B, H, T], those that do in any case. keys: makes them,
    float32 [B, H, T, D].
    """

    votes: Tensor
    positions: Tensor
    num_tokens: int
    room: Tensor
    always: Tensor
    keys: Callable[[], Tensor]


@dataclass(frozen=True)
class Selection(TokenPolicy):
    """A policy that keeps only some tokens, chosen for each KV head; sliding-window layers keep all of theirs.

    budget: tokens kept, sinks and latest ones included; up to 1 a fraction of the tokens so far, above 1 a number.
    evicts: whether tokens are dropped after the prompt, too: at every step, or when a block is full. remembers: whether
    attention is added up over calls. Kept tokens but the sinks and the `recent` latest are packed.
    """

    drops: ClassVar[bool] = True
    evicts: ClassVar[Evicts] = "never"
    remembers: ClassVar[bool] = False

    budget: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.budget < float("inf"):
            raise UserError(
                f"budget={self.budget:g} is not allowed; give a fraction of the prompt's tokens up to 1, or a number "
                "of tokens above 1"
            )

    @property
    def samples(self) -> bool:
        """Whether it holds samples that estimate attention, instead of chosen tokens."""
        return False

    def kept(self, tokens: int, layer: int = 0, layers: int = 1) -> int:
        """How many tokens may stay in layer `layer` of `layers` when there have been `tokens`; at least one."""
        return max(1, int(self.budget * tokens + 1e-6) if self.budget <= 1 else int(self.budget))

    def room(self, kept: int) -> int:
        """Of `kept` tokens, those that are left beside the sinks, at least one."""
        return kept - min(self.sinks, max(0, kept - 1))

    def latest(self, kept: int) -> int:
        """Latest tokens that are always among `kept` ones."""
        return min(self.recent, self.room(kept))

    def observed(self, queries: int) -> int:
        """How many of the latest `queries` queries of a prompt the policy wants to see the attention of."""
        return 0

    def ranks(self, tokens: Candidates) -> Tensor:
        """What decides who stays, highest first: float32 [B, H, T]. Sinks and the latest tokens stay in any case."""
        return tokens.positions.float()
