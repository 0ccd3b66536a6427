"""Base classes of token policies, which decide what stays exact, is packed or is evicted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from tersekv.errors import UserError
from tersekv.layouts.exact import DTYPES
from tersekv.units import parse_bytes

Evicts = Literal["never", "block", "step"]

PROMPT_TOKENS = 32
"""Minimum tokens of a call that counts as a prompt; the first call always does.

Shorter calls are generated tokens, or proposals of assisted decoding.
"""

UNLIMITED = "unlimited"

MOST_TOKENS = 10**12
"""Largest number of tokens that an option takes. Tensors of int64 hold sums of such numbers."""

CORRECTED_SHARES = {"off": 0.0, "half": 0.5, "full": 1.0}
"""Share of the bias that each value of `bias_correction` corrects."""


def is_prompt(n: int, first: bool, continues: bool) -> bool:
    """True if a call of n tokens belongs to a prompt under a policy that packs prompts only.

    first: it is the first call. continues: the call before it had at least PROMPT_TOKENS tokens, so
    2 or more tokens are the rest of a prompt fed in chunks.
    """
    return first or n >= PROMPT_TOKENS or (continues and n > 1)


class Rated(Protocol):
    """The part of a codec that policies use, see `tersekv.codecs.Codec`."""

    @property
    def has_rates(self) -> bool:
        """True if the codec quantises."""

    def at_rate(self, bits: float) -> Any:
        """Return the codec at another rate, or raise UserError."""


def two_rates(keys: Rated, values: Rated) -> bool:
    """True if a layer with these codecs can have two rates. A layer of exact tokens has one."""
    return keys.has_rates or values.has_rates


def check_lower_rate(rest: float | None, keys: Rated, values: Rated, allot: str = "") -> None:
    """Raise UserError unless both codecs have the lower rate of `rest` bits. Exact layers need none.

    rest: None if it is not known yet. Codecs must then have several rates.
    allot: option that chooses the rate, for the message.
    """
    for codec in (keys, values) if two_rates(keys, values) else ():
        try:
            codec.at_rate(getattr(codec, "bits", math.inf) if rest is None else rest)
        except UserError as error:
            asked = allot if rest is None else f"rest={rest:g}"
            raise UserError(f"{asked} is not available: {error}") from error
        if rest is not None and rest >= (bits := getattr(codec, "bits", math.inf)):
            raise UserError(
                f"rest={rest:g} must be lower than the codec's bits={bits:g}; give a lower rest, or more bits"
            )


@dataclass(frozen=True)
class TokenPolicy:
    """Policy of one recipe, shared by all layers. This base class keeps every token.

    sinks: number of attention sinks (first tokens) kept exact.
    recent: minimum number of latest tokens kept exact.
    exact: dtype of exact tokens. "auto" is the model's dtype if that has 16 bits, otherwise fp16.
    bias_correction: share of the bias of packed tokens' softmax weights that is corrected, see
        `cache/lost_variance.py`: off, half or full.
    observes: True if the policy uses attention weights of queries.
    drops: True if the policy evicts tokens (`Selection`).
    needs_scores: True if budgets differ by head and depend on the importance of a model's heads.
    recommended: recipe that suits most uses of the policy, "" for any method after it.
    """

    observes: ClassVar[bool] = False
    drops: ClassVar[bool] = False
    needs_scores: ClassVar[bool] = False
    recommended: ClassVar[str] = ""

    sinks: int = 4
    recent: int = 128
    exact: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    bias_correction: Literal["off", "half", "full"] = "off"

    def __post_init__(self) -> None:
        for name in ("sinks", "recent"):
            if (tokens := getattr(self, name)) < 0:
                raise UserError(f"{name}={tokens} is negative; give 0 or more tokens")
            if tokens > MOST_TOKENS:
                raise UserError(f"{name}={tokens} is out of range; allowed are 0 to {MOST_TOKENS} tokens")
        if self.exact != "auto" and self.exact not in DTYPES:
            raise UserError(f"exact={self.exact} is not allowed; choose one of auto, {', '.join(DTYPES)}")
        if self.bias_correction not in CORRECTED_SHARES:
            raise UserError(
                f"bias_correction={self.bias_correction} is not allowed; choose one of {', '.join(CORRECTED_SHARES)}"
            )

    @property
    def profile(self) -> str | None:
        """Name of what must be measured once per model before the policy can be used, or None.

        It names the file of the measurement, see `tersekv calibrate`.
        """
        return None

    @property
    def allots(self) -> bool:
        """True if layers get rates of their own (`sizes/rate_allotment.py`)."""
        return False

    @property
    def waits(self) -> bool:
        """True if rates are chosen on the prompt. Its first call stays exact until the last layer has read it."""
        return False

    def with_shares(self, budget: float, rest: float) -> TokenPolicy:
        """Return the policy of one layer with a share of the tokens and the bits of the others, if it `allots`."""
        return self

    @property
    def rest(self) -> float:
        """Bits of packed tokens with a lower rate than the codec's, 0 for none."""
        return 0.0

    @property
    def reads_twice(self) -> bool:
        """True if the policy ranks a prompt's tokens by a second reading of it."""
        return False

    @property
    def corrected_share(self) -> float:
        """Share of the bias that is corrected: 0, 0.5 or 1."""
        return CORRECTED_SHARES[self.bias_correction]

    @property
    def most_found(self) -> int:
        """Number of unusual tokens of a full-attention layer that are kept exact (`cache/found_sinks.py`)."""
        return 0

    @property
    def samples(self) -> bool:
        """True if the policy keeps samples that estimate attention instead of chosen tokens."""
        return False

    @property
    def packs_generated(self) -> bool:
        """True if generated tokens are packed like those of a prompt."""
        return True

    def exact_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of exact tokens for a model that computes in `model_dtype`."""
        if self.exact != "auto":
            return DTYPES[self.exact]
        return model_dtype if model_dtype.itemsize == 2 else torch.float16

    def sink_tokens(self, window: int | None) -> int:
        """Return the number of attention sinks of a layer with this sliding window.

        It is 0 for sliding-window layers, because they evict their first tokens.
        """
        return self.sinks if window is None else 0

    def first_packing(self, window: int | None) -> int:
        """Return the number of tokens that a layer with this sliding window must reach before it
        packs any.
        """
        return 0

    def waiting_tokens(self, block: int, window: int | None) -> int:
        """Return the number of tokens that are packed together: at most so many less one wait, next to `recent`."""
        return block

    def to_pack(self, waiting: int, block: int, seen: int, window: int | None) -> int:
        """Return the number of tokens to pack now, a multiple of `block`.

        seen: tokens the layer has received so far.
        waiting: exact tokens of the layer that are not sinks.

        The result depends on these counts only, so a prompt fed in chunks is packed identically.
        """
        due = 0 if seen < self.first_packing(window) else max(0, waiting - self.recent) // block * block
        return due if due >= self.waiting_tokens(block, window) else 0

    def check(self, keys: Rated, values: Rated) -> None:
        """Raise UserError unless the policy serves a layer with these codecs."""

    def options(self) -> dict[str, Any]:
        """Return the options by name, as in a recipe."""
        return dict(vars(self))


class Candidates(NamedTuple):
    """Tokens to choose from, T for each KV head.

    votes: float32 [B, H, T]. Attention weights that each token received from observed queries,
        summed over queries and averaged over the KV head's query heads.
    positions: int [B, H, T], −1 for an empty slot.
    num_tokens: tokens received so far.
    room: int64 [B, H], number of these candidates that may stay; [B, 1] if heads do not differ.
    always: bool [B, H, T], candidates that stay in any case.
    keys: function that returns the keys, float32 [B, H, T, D].
    """

    votes: Tensor
    positions: Tensor
    num_tokens: int
    room: Tensor
    always: Tensor
    keys: Callable[[], Tensor]


@dataclass(frozen=True)
class Selection(TokenPolicy):
    """A policy that evicts tokens, with a separate choice for each KV head.

    Sliding-window layers keep all tokens of their window. Kept tokens are packed, except the sinks
    and the `recent` latest tokens.

    budget: tokens kept, sinks and latest tokens included. Up to 1: a fraction of the tokens so far.
        Above 1: a number of tokens.
    memory: bytes of the whole cache of one sequence, such as 512MB or 2GiB, in place of `budget`.
        The policy then keeps as many tokens as fit, see `sizes/memory_budget.py`.
    rest: bits of the kept tokens of lower rank, fewer than the codec's. A token whose rank falls is
        first demoted to these bits, then evicted. 0: all have the codec's bits.
    rest_share: share of the kept tokens that have `rest` bits.
    remembers: True if attention weights are summed over calls.
    evicts_ahead: True if an eviction also makes room for later blocks, an eighth of the budget.
    """

    drops: ClassVar[bool] = True
    evicts_ahead: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    budget: float = 0.25
    memory: str = UNLIMITED
    rest: float = 0.0
    rest_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rest < 0:
            raise UserError(
                f"rest={self.rest:g} is not allowed; give the bits of tokens of lower rank, or 0 for one rate"
            )
        if not 0 < self.rest_share < 1:
            raise UserError(
                f"rest_share={self.rest_share:g} is not allowed; give a share of the kept tokens between 0 and 1"
            )
        if not 0 < self.budget <= MOST_TOKENS:
            raise UserError(
                f"budget={self.budget:g} is not allowed; give a fraction of the prompt's tokens up to 1, or a number "
                f"of tokens above 1, at most {MOST_TOKENS:g}"
            )
        if self.memory != UNLIMITED:
            parse_bytes(self.memory, "memory")
            if self.evicts == "never":
                raise UserError(
                    f"memory={self.memory} needs a policy that also evicts generated tokens: h2o, streaming or subgen"
                )
            if self.budget != type(self).budget:
                raise UserError(f"memory={self.memory} takes the place of budget={self.budget:g}; give one of them")

    def check(self, keys: Rated, values: Rated) -> None:
        """Raise UserError unless both codecs have the lower rate, if there is one."""
        if self.rest:
            check_lower_rate(self.rest, keys, values)

    def lower(self, kept: int) -> int:
        """Return how many of `kept` tokens have the lower rate."""
        return int(self.rest_share * kept + 1e-6) if self.rest else 0

    @property
    def evicts(self) -> Evicts:
        """When tokens are evicted after the prompt: never, whenever a block is full, or at every step."""
        return "never"

    def kept(self, tokens: int, layer: int = 0, layers: int = 1) -> int:
        """Return the number of tokens that may stay in layer `layer` of `layers`, at least one.

        tokens: number of tokens so far.

        Raises:
            UserError: the policy has `memory`, which depends on the model.
        """
        if self.memory != UNLIMITED:
            raise UserError(f"memory={self.memory} needs the model's shape; use tersekv.CompressedCache(model, recipe)")
        return max(1, int(self.budget * tokens + 1e-6) if self.budget <= 1 else int(self.budget))

    def of_heads(self, kept: int, tokens: int, scores: Tensor) -> Tensor:
        """Return the number of tokens that each head of the model keeps, int64 [layers, heads].

        It is used by policies with `needs_scores` only.

        kept: mean over the heads.
        scores: importance of the heads [layers, heads], negative in layers that take no part.
        """
        return torch.full(scores.shape, kept)

    def room(self, kept: int) -> int:
        """Return `kept` minus the number of sinks, at least one."""
        return kept - min(self.sinks, max(0, kept - 1))

    def latest(self, kept: int) -> int:
        """Return how many of `kept` tokens are always the latest ones."""
        return min(self.recent, self.room(kept))

    def observed(self, queries: int) -> int:
        """Return how many of the latest `queries` queries of a prompt the policy observes."""
        return 0

    def ranks(self, tokens: Candidates) -> Tensor:
        """Return a score per token, float32 [B, H, T]; the tokens with the highest scores stay.

        Sinks and the latest tokens stay in any case.
        """
        return tokens.positions.float()


@dataclass(frozen=True)
class Stepwise(Selection):
    """A policy that evicts tokens at every step, or a block of them at once.

    evict: "step", as in the papers: one token leaves for each that comes. "block": nothing leaves until
        a block of 32 is due. Until then up to 31 tokens more than the budget are kept. A step is many
        times faster.
    """

    evict: Literal["step", "block"] = "step"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evict not in ("step", "block"):
            raise UserError(f"evict={self.evict} is not allowed; choose one of step, block")

    @property
    def evicts(self) -> Evicts:
        """The option `evict`."""
        return self.evict
