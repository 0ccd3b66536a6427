"""KVQuant's claims (arXiv 2401.18079) that need no model: codebooks, outliers, thresholds, weights,
true bits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tersekv.codecs.kvquant import KVQuant
from tersekv.codecs.kvquant import build as kvquant
from tersekv.errors import UserError


@pytest.fixture(scope="module")
def keys() -> Tensor:
    """Return channels with different ranges and means, and a few outliers in each: [1, 3, 512, 64]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 512, 64, generator=generator)
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.006, 8 * x, x)
    size = torch.logspace(-1, 1, 64)[torch.randperm(64, generator=generator)]
    return (x + 2 * torch.randn(1, 3, 1, 64, generator=generator)) * size


def error(codec: KVQuant, x: Tensor) -> float:
    """Return the mean over channels of the squared error relative to the channel's variance."""
    codec = codec.fit(x)
    squared = (codec.decode(codec.encode(x), x.shape[-1]) - x).square()
    return float((squared.mean(2) / x.var(2)).mean())


def test_keys_per_channel_beat_keys_per_token(keys):
    assert error(KVQuant(3, axis="channel"), keys) < 0.5 * error(KVQuant(3, axis="token"), keys)


def test_values_per_channel_have_ranges_of_channels(keys):
    """Values are coded per token unless `value_axis=channel` asks for Table 9's comparison. Their ranges are then
    those of channels from the fit, so a token's own range is not stored."""
    assert kvquant().values.axis == "token"
    pair = kvquant(value_axis="channel", ranges="online", table="int", outliers=0.0)
    assert (pair.keys.axis, pair.values.axis, pair.values.ranges) == ("channel", "channel", "online")
    codec = pair.values.fit(keys)
    assert torch.equal(codec.fitted["lower"], keys.amin(2))
    assert torch.equal(codec.fitted["upper"], keys.amax(2))
    planes = codec.encode(keys)
    assert set(planes) == {"codes"}
    span = (codec.fitted["upper"] - codec.fitted["lower"]).unsqueeze(2)
    steps = (codec.decode(planes, 64) - keys).abs() / span
    assert float(steps.max()) < 1.01 / 14  # half of a step of 1/7, and float16 ranges


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_nuq_beats_nf_and_int(keys, bits):
    nuq, nf, even = (error(KVQuant(bits, table, 0.01, weights="none"), keys) for table in ("nuq", "nf", "int"))
    assert nuq < nf
    assert nuq < even


def test_more_outliers_less_error(keys):
    errors = [error(KVQuant(3, outliers=share), keys) for share in (0.0, 0.001, 0.005, 0.01)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.2 * errors[0]


def test_outliers_per_vector_beat_outliers_per_matrix(keys):
    assert error(KVQuant(3, outliers=0.01), keys) < error(KVQuant(3, outliers=0.01, outliers_per="matrix"), keys)


def test_outliers_are_exact(keys):
    """Outliers are decoded as float16 stores them."""
    codec = KVQuant(2, outliers=0.02).fit(keys)
    decoded = codec.decode(codec.encode(keys), 64)
    low, high = (codec.fitted[k].unsqueeze(2) for k in ("lower", "upper"))
    outside = (keys < low) | (keys > high)
    assert 0.015 < float(outside.float().mean()) < 0.03
    assert ((decoded - keys).abs() <= 2**-10 * (keys.abs() + high - low))[outside].all()


@pytest.mark.parametrize(("heads", "share", "count"), [(3, 0.01, 1), (2, 0.01, 1), (1, 0.01, 0), (3, 0.05, 9)])
def test_outliers_of_values_are_at_most_the_share(keys, heads, share, count):
    """Over all heads of a token: 1 of 192 values at 1 %, although quantiles round up to 1 at either end."""
    x = keys[:, :heads]
    planes = KVQuant(3, outliers=share, axis="token", side="values").fit(x).encode(x)
    assert len(planes["outlier_values"]) == count * 512


def test_thresholds_of_values_are_the_tokens_own(keys):
    codec = KVQuant(3, outliers=0.01, axis="token", side="values").fit(keys)
    planes = codec.encode(keys)
    assert planes["scale"].shape == (1, 1, 16, 1, 32)
    alone = codec.encode(keys[:, :, 64:96])
    assert torch.equal(alone["codes"], planes["codes"][:, :, 2:3])


def test_weights_of_eq_7():
    """Fisher information in some elements fits the codebook to them; without it all count equally.

    The squared scale weights channels by their errors in the activations.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.cat([torch.randn(1, 1, 512, 8, generator=generator), torch.rand(1, 1, 512, 8, generator=generator)], -1)
    fisher = torch.zeros_like(x)
    fisher[..., 8:] = 1.0

    def error_on(part: slice, codec: KVQuant, weights: Tensor | None) -> float:
        codec = codec.fit(x, weights)
        return float((codec.decode(codec.encode(x), 16) - x)[..., part].square().mean())

    base = KVQuant(2, outliers=0.0)
    plain = dataclasses.replace(base, weights="none")
    assert error_on(slice(8, 16), base, fisher) < error_on(slice(8, 16), plain, fisher)
    wide = x.clone()
    wide[..., :8] *= 100
    tables = {
        w: KVQuant(2, outliers=0.0, weights=w).fit(wide, torch.ones_like(x)).fitted["table"] for w in ("eq7", "none")
    }
    only = KVQuant(2, outliers=0.0, weights="none").fit(wide[..., :8]).fitted["table"]
    assert (tables["eq7"] - only).abs().max() < 0.02 < (tables["none"] - only).abs().max()


def test_q_norm_keeps_mean_and_deviation(keys):
    codec = KVQuant(2, q_norm=True, outliers=0.0).fit(keys)
    decoded, scale = codec.decode(codec.encode(keys), 64), (codec.fitted["upper"] - codec.fitted["lower"]) / 2
    middle = (codec.fitted["upper"] + codec.fitted["lower"]) / 2
    ours, theirs = (((x - middle.unsqueeze(2)) / scale.unsqueeze(2)) for x in (decoded, keys))
    assert float(ours.mean()) == pytest.approx(float(theirs.mean()), abs=2e-3)
    assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=5e-3)


@pytest.mark.parametrize(
    ("bits", "share", "printed"), [(4, 0.01, 4.33), (3, 0.01, 3.33), (2, 0.01, 2.33), (3, 0.0, 3.01)]
)
def test_true_bits_are_near_the_printed_ones(bits, share, printed):
    """The paper counts 32 bits per outlier and almost nothing else. Ours also counts row starts and
    codebooks."""
    pair = kvquant(bits=bits, outliers=share)
    mean = (pair.keys.true_bits(128, heads=32) + pair.values.true_bits(128, heads=32)) / 2
    assert printed - 0.005 < mean < printed + 0.025


def test_needs_fit_names_the_missing_data():
    assert KVQuant().needs_fit == "corpus"
    assert KVQuant(calibration="prompt").needs_fit == "prompt"
    assert KVQuant(table="int", axis="token").needs_fit is None
    assert KVQuant(table="nf", ranges="online").needs_fit == "prompt"
    both = KVQuant(ranges="online")
    assert both.needs_fit == "corpus"
    with_table = dataclasses.replace(both, fitted={"table": torch.linspace(-1, 1, 8)[None]})
    assert with_table.needs_fit == "prompt"
    fitted = with_table.fit(torch.randn(1, 2, 64, 32))
    assert fitted.needs_fit is None
    assert torch.equal(fitted.fitted["table"], with_table.fitted["table"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 1}, "bits=1 is out of range; allowed are 2 to 5"),
        ({"table": "fp4"}, "table=fp4 is not allowed; choose one of nuq, nf, int"),
        ({"outliers": 0.2}, "outliers=0.2 is out of range; allowed are 0 to 0.1"),
        ({"outliers": -0.1}, "out of range"),
        ({"outliers_per": "head"}, "choose one of vector, matrix"),
        ({"cap": 256}, "cap=256 is out of range"),
        ({"room": 0.05}, "room=0.05 is out of range; allowed are 0 and 0.1 to 10"),
    ],
)
def test_wrong_options(options, text):
    with pytest.raises(UserError, match=text):
        KVQuant(**options)


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_blocks_with_room_for_all_outliers_are_those_of_the_list(keys, axis):
    listed = KVQuant(3, outliers=0.02, axis=axis, calibration="prompt").fit(keys)
    roomy = dataclasses.replace(listed, room=10.0)
    assert torch.equal(roomy.decode(roomy.encode(keys), 64), listed.decode(listed.encode(keys), 64))
    tight = dataclasses.replace(listed, room=1.0)
    assert tight.places(64) == math.ceil(0.02 * 32 * 64)
    assert dataclasses.replace(listed, room=1.0).fit(keys).fitted["table"].equal(listed.fitted["table"])


def test_the_most_extreme_outliers_of_a_block_win(keys):
    """The others are clamped to the thresholds, and a token's range covers them."""
    listed = KVQuant(3, outliers=0.02, calibration="prompt").fit(keys)
    few = dataclasses.replace(listed, room=0.5)
    low, high = (listed.fitted[name].unsqueeze(2) for name in ("lower", "upper"))
    excess = torch.maximum(low - keys, keys - high).unflatten(2, (-1, 32)).flatten(3)
    kept = few.encode(keys)["outlier_places"].long() & 0xFFFF
    element = (kept >> 11) * 64 + (kept & 2047)
    wanted = excess.topk(few.places(64), dim=-1)
    assert bool((wanted.values > 0).any(-1).all())
    for got, place, most in zip(
        element.flatten(0, 2), wanted.indices.flatten(0, 2), wanted.values.flatten(0, 2), strict=True
    ):
        assert set(place[most > 0].tolist()) <= set(got.tolist())
    decoded = few.decode(few.encode(keys), 64)
    beyond = ((keys - decoded).abs().unflatten(2, (-1, 32)).flatten(3) / excess.clamp_min(1e-9))[excess > 0]
    assert 0 < float((beyond > 0.9).float().mean()) < 0.9  # some are clamped, some are stored
    of_tokens = KVQuant(3, "int", outliers=0.02, axis="token", room=0.5)
    x = of_tokens.decode(of_tokens.encode(keys), 64)
    span = keys.amax((1, 3)) - keys.amin((1, 3))
    assert bool(((x - keys).abs().amax((1, 3)) <= span / 12).all())  # half of a step of 1/7


def test_every_entry_of_a_block_is_counted():
    codec = KVQuant(3, outliers=0.01, room=1.5)
    bits = codec.layout(128).bits(128) - KVQuant(3, outliers=0.0).layout(128).bits(128)
    assert bits == pytest.approx(math.ceil(1.5 * 0.01 * 32 * 128) * 32 / (32 * 128))


def test_wrong_axis_of_values():
    with pytest.raises(UserError, match="value_axis=head is not allowed; choose one of token, channel"):
        kvquant(value_axis="head")
