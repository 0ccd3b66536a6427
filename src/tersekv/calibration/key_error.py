"""Error that coding leaves in keys, relative to what tells keys apart.

Attention tells keys apart by their differences. In models with biases of keys, such as Qwen2.5, the
mean of keys before RoPE is many times as long as these differences. The error of most codecs grows
with the length of the whole vector. It then drowns the differences.

Lengths are root mean squares over tokens, before RoPE:

    spread   length of k − mean(k)
    mean     length of mean(k), in units of the spread
    error    length of k − k̂, in units of the spread

docs/measured/quality.md has measurements.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache import coding
from tersekv.cache.coding import Tokens
from tersekv.cache.parallel import HeadShard
from tersekv.cache.rotary import Rotary
from tersekv.codecs import Codec
from tersekv.errors import UserError
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.transforms.angles import Angles
from tersekv.transforms.rope import Rope

MOST_TOKENS, LEAST_TOKENS = 128, 16
"""Largest sample of tokens, and smallest sample of one batch row."""

STEP = 32
"""Generated tokens between two looks if a layer has packed any, before its error of keys is measured."""

LARGE_MEAN, LARGE_ERROR = 6.0, 3.0
"""Mean from which keys are coded again, and error from which their recipe is reported."""

BIASED_MEAN = 90.0
"""Mean of the keys that stand for a model with key biases: that of Qwen2.5-0.5B's first layer."""

HEADS = 2
"""KV heads of these keys."""

CODED_BY_CHANNEL = "kivi:bits=4"
"""Recipe that any model can use, whatever the mean of its keys is."""


class KeyFigures(NamedTuple):
    """Lengths of the mean and of the error of keys, in units of their spread."""

    mean: float
    error: float

    @property
    def is_large(self) -> bool:
        """True if the error drowns the differences of the keys, and removing their mean would help."""
        return self.mean > LARGE_MEAN and self.error > LARGE_ERROR


def sample_tokens(n: int, rows: int) -> int:
    """Return how many of n tokens of each of `rows` batch rows are coded again. 0 if they are too few."""
    taken = min(n, max(MOST_TOKENS // rows, 2 * LEAST_TOKENS))
    return taken if taken >= LEAST_TOKENS else 0


def key_error(
    codec: Codec, x: Tensor, angles: Angles, counts: Tensor | None = None, heads: HeadShard | None = None
) -> KeyFigures:
    """Return the lengths in the head where the error is largest.

    The error is 0 where no head has a large mean. Then nothing is coded, which takes longest.

    codec: fitted, if it needs that.
    x: keys [B, H, n, D] as a cache receives them.
    angles: of these keys.
    counts: bool [B, n], False for padding and sinks, or None.
    heads: this process's heads under tensor parallelism, or None.
    """
    D, own = x.shape[-1], angles if codec.needs_rope else None
    of = _Spread.of(x, angles, counts)
    means = of.means()
    # all processes take part in the encoding of a layer, whatever their own heads are like
    if heads is None and not (largest := float(means.max())) > LARGE_MEAN:
        return KeyFigures(largest, 0.0)
    planes = coding.encode(codec, Tokens(x, own), heads)
    decoded = coding.view(codec, planes, D, own).decode()[:, :, : x.shape[2]]
    lost = _mean_square(x - decoded, angles, of.weights)
    errors = torch.where(of.known, lost / of.square, 0.0).sqrt()
    worst = errors.argmax()
    return KeyFigures(*torch.stack([means.flatten()[worst], errors.flatten()[worst]]).tolist())


def largest_means(x: Tensor, angles: Angles, counts: Tensor | None = None) -> Tensor:
    """Return the length of the mean in the head where it is largest, [B], see `key_error`."""
    return _Spread.of(x, angles, counts).means().amax(1)


class _Spread(NamedTuple):
    """The mean of keys before RoPE and their mean squared distance from it, float64 [B, H].

    mean: its squared length. known: bool [B, H], True where they differ by more than rounding. weights: of tokens,
    float64 [1 or B, 1, n, 1].
    """

    mean: Tensor
    square: Tensor
    known: Tensor
    weights: Tensor

    @classmethod
    def of(cls, x: Tensor, angles: Angles, counts: Tensor | None) -> _Spread:
        keys = x.float() if x.device.type == "mps" else x.double()  # a large mean is subtracted
        weights = keys.new_ones(1, 1, x.shape[2], 1) if counts is None else counts[:, None, :, None].to(keys.dtype)
        tokens = weights.sum(2, keepdim=True)
        mean = (coding.sum_without_rope(keys * weights, angles) / tokens.clamp_min(1)).square().sum((2, 3))
        square = _mean_square(keys, angles, weights) - mean
        # equal tokens have keys that differ by rounding alone, which no codec has to keep
        rounding = torch.finfo(torch.float16 if x.dtype == torch.float32 else x.dtype).eps / 4
        return cls(mean, square, (tokens[..., 0, 0] >= LEAST_TOKENS) & (square > mean * rounding**2), weights)

    def means(self) -> Tensor:
        """Return the lengths of the means in units of the spread, [B, H]; 0 where that is unknown."""
        return torch.where(self.known, self.mean / self.square, 0.0).sqrt()


def _mean_square(x: Tensor, angles: Angles, weights: Tensor) -> Tensor:
    """Return the weighted mean over tokens of the squared length before RoPE of x [B, H, n, D], as [B, H]."""
    if (pairs := angles.of_pairs(x.shape[-1])) is None:
        squares = angles.rope.invert(x, *angles.cos_sin()).square()
    else:
        squares = x.square() / pairs.squared.unsqueeze(1)
    return (squares * weights).sum((2, 3)) / weights.sum((2, 3)).clamp_min(1)


def biased_keys(rope: Rope, heads: int, D: int, first: int, n: int) -> Tensor:
    """Return keys [1, heads, n, D] from position `first` on, as a model with key biases makes them.

    Before RoPE their channels are normal with variance 1, around a mean. The slower RoPE rotates a
    channel, the larger is its mean, as in Qwen2.5-0.5B.
    """
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, heads, n, D, generator=generator)
    unit = torch.eye(D)[None, :, None]  # one head per channel
    moved = (rope.apply(unit, *_cos_sin(rope, 1, 1)) - rope.apply(unit, *_cos_sin(rope, 0, 1))).square().sum((0, 2, 3))
    sizes = torch.empty(D)
    sizes[moved.argsort(stable=True)] = (torch.arange(D) * (-10.0 / D)).exp() + 0.06
    signs = torch.randint(0, 2, (1, heads, 1, D), generator=generator) * 2 - 1
    keys += signs * sizes * (BIASED_MEAN * D**0.5 / float(sizes.norm()))
    return rope.apply(keys, *_cos_sin(rope, first, n))


def _cos_sin(rope: Rope, first: int, n: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [1, n, R] of positions from `first` on."""
    cos, sin = rope.cos_sin(first, n, first + n, torch.device("cpu"))
    return cos[None], sin[None]


def error_with_biases(recipe: Recipe, shape: CacheShape) -> KeyFigures | None:
    """Return the largest error of keys that a model with key biases makes; None if nothing is measured.

    Codecs that need a corpus are fitted on these keys instead, if they can be.

    Raises:
        UserError: the recipe does not fit the head dim or the layers.
    """
    recipe = recipe.learning_from_prompt() or recipe
    known: dict[tuple[Codec, int], KeyFigures] = {}
    for layer in range(len(shape.windows)):
        codec, rope = recipe.plan(layer, len(shape.windows)).keys, shape.ropes[layer] if shape.ropes else None
        if (codec, id(rope)) in known or rope is None or not codec.has_rates or codec.needs_fit == "corpus":
            continue
        length = 2 * MOST_TOKENS
        rotary, latest, x = Rotary(rope), length - MOST_TOKENS, biased_keys(rope, HEADS, shape.key_dim, 0, length)
        angles = rotary.angles(0, length, x.device) if codec.needs_rope else None
        codec, key = coding.fitted(codec, [Tokens(x, angles)]), (codec, id(rope))
        known[key] = key_error(codec, x[:, :, latest:], rotary.angles(latest, MOST_TOKENS, x.device))
    return max(known.values(), key=lambda figures: figures.error, default=None)


def remedy(recipe: Recipe, rope: Rope | None) -> str:
    """Return the recipe with the mean of keys removed, or another one that codes keys by channel.

    rope: None if RoPE cannot be removed from the keys.
    """
    data = json.loads(recipe.to_json())
    for term, coder in zip([data, *data["layers"]], recipe.coders, strict=True):
        codec = coder.at(0)[0]
        if codec.has_rates and not codec.centred:
            term["keys"]["options"]["centre"] = True
    try:
        other = Recipe.from_json(json.dumps(data))
    except UserError:  # the method has no such option, or not beside the others
        return CODED_BY_CHANNEL
    return CODED_BY_CHANNEL if rope is None or other == recipe else other.name
