"""Rates of each KV head under `mixed` with `allot=prompt` or `allot=model` (ours; docs/methods/mixed.md).

Every head gets two rates and a share of tokens for the higher one. Let a(s) be the squared
attention that a head's most important share s of tokens receives later, as a prompt shows it
(`attention/spread.py`) or a measurement of the model (`calibration/attention_spread.py`), and ε(b) the
squared error of codes with b bits. A head with bits b, rest r and share s loses

    a(s)·ε(b) + (a(1) − a(s))·ε(r).

The sum of these losses is minimised over the heads of all layers. Codes and scales take as many bytes as
with the recipe's bits everywhere. Each head's choice minimises loss + λ·bytes, with one λ for all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.segments import STEPS
from tersekv.codecs import Codec
from tersekv.codecs.common.layer_choice import WIDE
from tersekv.errors import UserError
from tersekv.policies.base import two_rates
from tersekv.recipe import LayerPlan

CANDIDATES = (0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5, 4, 5, 6, 8)
"""Bits that are tried. Less than 1 bit is for layers that read a few tokens only."""

LEAST_ON_PROMPT = 0.75
"""Least bits with `allot=prompt`. A prompt does not show what its last quarter never looked at, and later text may."""

MOST_ON_PROMPT = 3 / 4
"""Largest share of a head's tokens that can have its higher rate with `allot=prompt`. If a head has read almost all
tokens, no query has asked for the few others yet. A much lower rate for them saves few bytes and loses facts."""

LEAST_OF_WIDE = 3.5
"""Least mean bits of heads of `WIDE` channels with `allot=prompt`. Gemma 3 270M missed 2 of 5 passkeys at 4,096 tokens
with 3 bits, and 1 of 10 with 3.5."""

USUAL = (torch.arange(STEPS + 1) / STEPS).pow(0.1)
"""Spread that counts for all heads if it is unknown. Its form is that of most layers."""


SEARCHES = 60
"""Halvings of the range of prices. More change no choice: a double has 53 bits."""


class Option(NamedTuple):
    """Rates of one head and the bytes of one of its tokens, mean over tokens."""

    bits: float
    rest: float
    steps: int
    bytes: float


def allotted(plans: Mapping[int, LayerPlan], spread: Tensor, dims: tuple[int, int]) -> dict[int, LayerPlan]:
    """Return the plans with rates of their own in every head of the layers that can have two.

    spread: float32 [layers, KV heads, STEPS + 1], see `calibration/attention_spread.py`. dims: channels of a
        key and of a value.

    Raises:
        UserError: keys and values, or layers, have different bits, or the codec has no other rates.
    """
    own = {i: plan for i, plan in plans.items() if bool((spread[i] >= 0).all()) and two_rates(plan.keys, plan.values)}
    if not own:
        return dict(plans)
    bits = {getattr(codec, "bits", None) for plan in own.values() for codec in (plan.keys, plan.values)}
    if len(bits) > 1 or None in bits:
        found = ", ".join(sorted("none" if b is None else f"{b:g}" for b in bits))
        raise UserError(
            f"{asked(own)} needs the same bits for keys and values and in all layers that are not exact, got "
            f"{found}; give one number of bits, or use allot=layer"
        )
    first = next(iter(own.values()))
    sizes, most = _sizes(first, dims)
    if any(plan[:3] != first[:3] and _sizes(plan, dims) != (sizes, most) for plan in own.values()):
        raise UserError(f"{asked(own)} needs the same method in all layers that are not exact; use allot=layer")
    share = MOST_ON_PROMPT if first.policy.waits else 1
    best = least_loss(spread[list(own)].double().flatten(0, 1), sizes, most, share)
    rates = torch.tensor([[one.bits, one.rest, one.steps / STEPS] for one in best]).unflatten(0, (len(own), -1))
    return dict(plans) | {i: with_rates(plan, rates[k]) for k, (i, plan) in enumerate(own.items())}


def asked(plans: Mapping[int, LayerPlan]) -> str:
    """Return the option that asks for rates of each head, for messages."""
    return f"mixed: allot={next(iter(plans.values())).policy.options()['allot']}"


def least_loss(received: Tensor, sizes: Mapping[float, float], most: float, share: float = 1) -> list[Option]:
    """Return the rates of each head that lose least.

    received: float64 [heads, STEPS + 1], a(k/STEPS) of each head. sizes: bytes of a token by bits.
    most: mean bytes that a token may have. share: largest share of tokens with the higher rate.
    """
    pairs = [(a, b) for a in sizes for b in sizes if a > b]
    options = [
        Option(a, b, k, (k * sizes[a] + (STEPS - k) * sizes[b]) / STEPS)
        for a, b in pairs
        for k in range(1, STEPS)
        if k <= share * STEPS
    ]
    errors = {bits: Codec.expected_error(bits) for bits in sizes}
    error = torch.tensor([[errors[o.bits], errors[o.rest]] for o in options], dtype=torch.float64)
    steps, size = torch.tensor([o.steps for o in options]), torch.tensor([o.bytes for o in options])
    first = received[:, steps]
    loss = first * error[:, 0] + (received[:, -1:] - first) * error[:, 1]
    loss = loss / loss.mean().clamp_min(1e-30)
    low, high = 1e-12, 1e12
    for _ in range(SEARCHES):
        price = math.sqrt(low * high)
        chosen = (loss + price * size).argmin(dim=1)
        low, high = (price, high) if float(size[chosen].mean()) > most else (low, price)
    return [options[k] for k in (loss + high * size).argmin(dim=1).tolist()]


def usual(plan: LayerPlan, dims: tuple[int, int], heads: int) -> tuple[LayerPlan, int]:
    """Return the plan with rates whose mean size is that of the recipe's bits, and the most tiers that it can have.

    Estimates use it in place of the rates of each head, which are not known without a measurement. All heads have the
    rates of the usual spread. Their shares differ, because each is rounded up to whole blocks, half a block on average.
    """
    rates, tiers = _usual_rates(plan._replace(layer=0, scores=None, rates=None), dims, heads)
    return with_rates(plan, rates), tiers


@functools.lru_cache(maxsize=64)  # an estimate asks for each layer and length
def _usual_rates(plan: LayerPlan, dims: tuple[int, int], heads: int) -> tuple[Tensor, int]:
    """Return the rates of each head, see `LayerPlan.rates`, and the most tiers of `usual`."""
    sizes, most = _sizes(plan, dims)
    best = least_loss(USUAL[None].double(), sizes, most)[0]
    share = min((most - sizes[best.rest]) / (sizes[best.bits] - sizes[best.rest]), 1 - 1e-6)
    each = (2 * torch.arange(heads, dtype=torch.float64) + 1) / heads
    shares = share * each if share <= 0.5 else 1 - (1 - share) * each
    rates = torch.tensor([best.bits, best.rest]).double().expand(heads, 2)
    return torch.cat([rates, shares[:, None]], dim=1), min(2 * heads, len(sizes))


def with_rates(plan: LayerPlan, rates: Tensor) -> LayerPlan:
    """Return the plan of a layer with these rates, see `LayerPlan.rates`.

    Raises:
        UserError: the codecs do not have them.
    """
    bits, share = rates[:, :2].unique().tolist(), float(rates[:, 2].mean())
    keys, values = ([codec.at_rate(of) for of in bits] for codec in (plan.keys, plan.values))
    made = plan.policy.with_shares(share, bits[0])
    made.check(keys[-1], values[-1])
    return plan._replace(keys=keys[-1], values=values[-1], policy=made, rates=rates)


def _sizes(plan: LayerPlan, dims: tuple[int, int]) -> tuple[dict[float, float], float]:
    """Return the bytes of a token of one head by bits, and the mean bytes that tokens may have.

    The latter belong to the bits of the codec, also if it would round them up to whole words.
    """
    for codec, dim in zip((plan.keys, plan.values), dims, strict=True):
        codec.layout(dim)  # raises if the method does not serve this head dim
    least = LEAST_ON_PROMPT if plan.policy.waits else 0
    by_size = {_bytes(plan, bits, dims): bits for bits in CANDIDATES if bits >= least}  # of equal sizes the last one
    sizes = {bits: size for size, bits in by_size.items() if size is not None}
    bits = float(getattr(plan.keys, "bits", 0))
    if bits and plan.policy.waits and dims[0] >= WIDE:
        bits = max(bits, LEAST_OF_WIDE)
    beside = min((size - own * sum(dims) / 8 for own, size in sizes.items()), default=0.0)  # scales, gains
    most = beside + bits * sum(dims) / 8
    if not sizes or min(sizes.values()) >= most or max(sizes.values()) <= most:
        known = ", ".join(f"{own:g}" for own in sizes) or "none"
        raise UserError(
            f"{asked({0: plan})} needs rates above and below the recipe's bits={bits:g}, and this codec has {known} at "
            "this head dim; give other bits, or use allot=layer"
        )
    return sizes, most


def _bytes(plan: LayerPlan, bits: float, dims: tuple[int, int]) -> float | None:
    """Return the bytes of one token of one head with these bits, or None if a codec has no such rate."""
    total = 0.0
    for codec, dim in zip((plan.keys, plan.values), dims, strict=True):
        try:
            layout = codec.at_rate(bits).layout(dim)
        except UserError:
            return None
        total += layout.block_bytes() / layout.block_tokens
    return total
