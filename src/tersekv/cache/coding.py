"""Convert between cached tokens and a codec's input and output.

    cached keys   ->  RoPE removed (`pre_rope`), or their rotated mean removed (`centred`)  ->  fit, encode
    packed keys   ->  the codec's view  ->  RoPE applied, or the rotated mean added

Values, and keys of all other codecs, are only converted to float32. Stores, simulated passes, engine
pages and benchmarks all use these functions. The same tokens therefore give the same bytes
everywhere.

Shapes: tokens [B, H, n, D]. `angles` are those of the keys' RoPE, or None if the codec needs none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.pages import blank
from tersekv.cache.parallel import HeadShard
from tersekv.codecs import Codec
from tersekv.kernels import backends
from tersekv.layouts.base import PackedTensors, View
from tersekv.layouts.mean_removed import MeanRemoved, RotatedMean
from tersekv.layouts.roped import Roped
from tersekv.tensors import gathered
from tersekv.transforms.angles import Angles
from tersekv.transforms.marked_angles import MarkedAngles
from tersekv.transforms.moments import Moments, TokenLoss

ENCODE_ELEMENTS = 1 << 19
"""Elements of one side encoded at a time. Limits the memory of float32 copies."""

ENCODE_ELEMENTS_ON_GPU = 1 << 23
"""The same on a GPU, where an encoding takes many launches and its time hardly depends on its size."""

MOST_INPUT, MOST_INPUT_ON_GPU = 1 << 22, 1 << 26
"""Elements of float32 tokens that are held at a time if some heads' tokens are encoded at several rates, or those of
one head."""

TOGETHER, TOGETHER_ON_GPU = 1 << 18, 1 << 21
"""Elements of several heads and rates that are encoded in one call. More would need large copies of their bases."""

FIT_TOKENS = 2048
"""Maximum number of prompt tokens that a codec is fitted on, to limit float64 copies."""

FIT_PARTS = 8
"""Number of stretches that these tokens are taken from in a longer prompt."""


class Tokens(NamedTuple):
    """Tokens of one side with their RoPE angles, or None."""

    x: Tensor
    angles: Angles | None = None


def codec_input(codec: Codec, tokens: Tokens) -> Tensor:
    """Return float32 tokens for the codec: keys without RoPE, or without their rotated mean."""
    x, angles = tokens
    if angles is None or not x.shape[2]:
        return x.to(torch.float32, memory_format=torch.contiguous_format)
    if codec.centred:
        return RotatedMean(codec.fitted["mean"], angles.rope, angles).removed_from(x)
    return angles.rope.invert(x.float(), *angles.cos_sin())


class ToFit(NamedTuple):
    """A codec, and a prompt's tokens that it is fitted on if it needs that.

    A centred codec is not fitted on attention sinks, because their mean differs.

    loss: of errors in the tokens of `parts`, for a codec that `observes` queries. Then it is not
        fitted on `sinks` either.
    """

    codec: Codec
    parts: Sequence[Tokens]
    sinks: Tokens | None = None
    loss: TokenLoss | None = None


def fitted(
    codec: Codec,
    parts: Sequence[Tokens],
    sinks: Tokens | None = None,
    heads: HeadShard | None = None,
    loss: TokenLoss | None = None,
) -> Codec:
    """Return one codec fitted, see `ToFit` and `fitted_sides`."""
    return fitted_sides([ToFit(codec, parts, sinks, loss)], heads)[0]


def fitted_sides(sides: Sequence[ToFit], heads: HeadShard | None = None) -> list[Codec]:
    """Return the codecs of a layer's sides, fitted.

    heads: this process's heads under tensor parallelism, or None.
    """
    observing = [side.codec.needs_fit == "prompt" and side.codec.observes and side.loss is not None for side in sides]
    sums = [_moments(side) for side, observes in zip(sides, observing, strict=True) if observes]
    kinds = {type(codec) for codec, _ in sums}
    if heads is None and len(kinds) == 1:
        found = iter(kinds.pop().fit_all(sums))
    else:
        found = (codec.fit_moments(of) if heads is None else heads.fit_moments(codec, of) for codec, of in sums)
    both = zip(sides, observing, strict=True)
    return [next(found) if observes else _fitted_to_tokens(side, heads) for side, observes in both]


def _fitted_to_tokens(side: ToFit, heads: HeadShard | None) -> Codec:
    codec, parts, sinks, _ = side
    if codec.needs_fit != "prompt":
        return codec
    if codec.centred:
        codec = _with_mean(codec, parts)
        if codec.needs_fit is None:
            return codec
    elif sinks is not None:
        parts = [sinks, *parts]
    x = torch.cat([codec_input(codec, part) for part in parts], dim=2)
    return codec.fit(x) if heads is None else heads.fit(codec, x)


def _moments(side: ToFit) -> tuple[Codec, Moments]:
    """Return the codec with its mean, and sums over weighted tokens, which are made part by part."""
    codec, parts, _, loss = side
    assert loss is not None
    if codec.centred:
        codec = _with_mean(codec, parts)
    loss, sums, start = loss.relative("scores" if codec.observes == "scores" else "prompt"), [], 0
    if codec.pre_rope:
        loss = loss._replace(metric=None)  # queries are observed after RoPE
    for part in parts:
        stop = start + part.x.shape[2]
        sums.append(Moments.weighted(codec_input(codec, part), loss.tokens(start, stop)))
        start = stop
    return codec, functools.reduce(Moments.plus, sums)


def _with_mean(codec: Codec, parts: Sequence[Tokens]) -> Codec:
    """Return a centred codec with the mean of these keys, or its own from a corpus."""
    return codec if "mean" in codec.fitted else codec.with_mean(_mean_without_rope(parts))


def _mean_without_rope(parts: Sequence[Tokens]) -> Tensor:
    """Return the mean of keys before RoPE, float32 [B, H, 1, D]."""
    total = sum(sum_without_rope(*part) for part in parts)
    assert isinstance(total, Tensor)
    return total / sum(part.x.shape[2] for part in parts)


def sum_without_rope(x: Tensor, angles: Angles | None) -> Tensor:
    """Return the sum of keys before RoPE, float32 or, of float64 keys, float64 [B, H, 1, D].

    Sums are taken before the two channels of a pair are combined, so that no key is copied.
    """
    assert angles is not None
    D = x.shape[-1]
    if (pairs := angles.of_pairs(D)) is None:
        x = x if x.dtype == torch.float64 else x.float()
        return angles.rope.invert(x, *angles.cos_sin()).sum(2, keepdim=True)
    channels = angles.rope.channels(D)
    assert channels is not None
    partner, _, _, sign = channels.to(x.device).long().unbind(-1)
    along, across = backends.rotated_sums(x, pairs.cos.unsqueeze(1), pairs.sin.unsqueeze(1))
    return ((along - sign * across[..., partner.clamp_min(0)]) / pairs.squared).unsqueeze(2)


def fit_stretches(tokens: int) -> list[tuple[int, int]]:
    """Return ranges of tokens to fit on: all, or equal stretches spread over the prompt."""
    if tokens <= FIT_TOKENS:
        return [(0, tokens)]
    length = FIT_TOKENS // FIT_PARTS
    starts = [(tokens - length) * i // (FIT_PARTS - 1) for i in range(FIT_PARTS)]
    return [(start, start + length) for start in starts]


def encode(codec: Codec, tokens: Tokens, heads: HeadShard | None = None) -> PackedTensors:
    """Encode tokens. A partial last block is padded with its last token, which keeps minima and
    maxima.

    heads: this process's heads under tensor parallelism, or None.

    Tokens on torch's device meta have shapes only, and so has the result.
    """
    if tokens.x.is_meta:
        B, H, n, D = tokens.x.shape
        layout = codec.layout(D)
        return blank(layout, B, H, -(-n // layout.block_tokens), "meta")
    plain = codec.encodes_halves and tokens.angles is None
    x = tokens.x if plain else codec_input(codec, tokens)
    missing = -x.shape[2] % codec.layout(x.shape[-1]).block_tokens
    if missing:
        x = torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], dim=2)
    return codec.encode(x) if heads is None else heads.encode(codec, x)


def chunks(start: int, stop: int, block_tokens: int, like: Tensor) -> Iterator[tuple[int, int]]:
    """Split a range of tokens into parts of at most ENCODE_ELEMENTS elements (more on a GPU), or of
    one block.

    like: tokens [B, H, n, D] of the same shape, any n.
    """
    B, H, _, D = like.shape
    most = ENCODE_ELEMENTS_ON_GPU if like.is_cuda else ENCODE_ELEMENTS
    step = max(1, most // (B * H * D * block_tokens)) * block_tokens
    step = max(1, stop - start) if like.is_meta else step
    return ((first, min(stop, first + step)) for first in range(start, stop, step))


def by_head(
    x: Tensor, which: Tensor, unit: int, angles: Callable[[Tensor], Angles | None] | None, counts: Tensor | None
) -> Iterator[tuple[Tokens, Tensor | None]]:
    """Yield the tokens `which` [B, H, n] of x [B, H, T, D] in parts, and which of them count.

    angles: function that returns the RoPE angles of some of `which`, or None. counts: bool [B, 1 or H, n].
    """
    for start, stop in chunks(0, which.shape[2], unit, x):
        index = which[:, :, start:stop]
        yield Tokens(gathered(x, index), angles and angles(index)), None if counts is None else counts[:, :, start:stop]


def view(codec: Codec, planes: PackedTensors, head_dim: int, angles: Angles | MarkedAngles | None) -> View:
    """Return packed tokens as attention reads them. angles: RoPE angles of all these tokens."""
    coded = codec.view(planes, head_dim)
    if angles is None:
        return coded
    if codec.centred:
        return MeanRemoved(coded, RotatedMean(codec.fitted["mean"], angles.rope, angles))
    return Roped(coded, angles.rope, angles)


# ---------------------------------------------------------------- left-padded batches


def own_sinks(padding: Tensor, sinks: int) -> Tensor:
    """Return positions [B, sinks] of each row's own first tokens.

    padding: int64 [B], number of leading positions without a token.
    """
    return padding[:, None] + torch.arange(sinks, device=padding.device)


def without_padding(x: Tensor, padding: Tensor, sinks: int) -> Tensor:
    """Prepare all tokens so far, [B, H, T, D], for packing.

    Padding is replaced by the row's last token, so that scales and fitted channels do not depend on
    it. The first `sinks` places hold each row's own first tokens.
    """
    hidden = (torch.arange(x.shape[2], device=x.device) < padding[:, None])[:, None, :, None]
    x = torch.where(hidden, x[:, :, -1:], x)
    if sinks == 0:
        return x
    index = own_sinks(padding, sinks)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return torch.cat([x.gather(2, index), x[:, :, sinks:]], dim=2)
