"""OSCAR (arXiv 2605.17757) against an independent computation: rotation, clipping, weights, calibration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from conftest import prompt
from tersekv.attention.read import AttentionCall
from tersekv.cache.parallel import HeadShard
from tersekv.calibration.calibrate import Calibrator, Corpus
from tersekv.calibration.capture import LayerTokens, watch_calls
from tersekv.codecs.oscar import Oscar, bit_reversed, rotation_of
from tersekv.kernels.basis import unpacked_basis
from tersekv.layouts.base import Side
from tersekv.recipe import Recipe
from tersekv.transforms.moments import Moments, TokenLoss, score_loss

D = 64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def skewed(T: int, heads: int = 2, seed: int = 0) -> Tensor:
    """Return vectors [1, heads, T, D] most of whose energy is in a few directions."""
    mix = normal(heads, D, D, seed=seed + 1) * (0.9 ** torch.arange(D))[:, None]
    return normal(1, heads, T, D, seed=seed) @ mix


def energies(basis: Tensor, form: Tensor) -> Tensor:
    """Return the energy of each component whose row is in the basis, relative to their mean."""
    found = torch.einsum("...ij,...jk,...ik->...i", basis.double(), form, basis.double())
    return found / found.mean(-1, keepdim=True)


def test_bit_reversal():
    assert bit_reversed(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert sorted(bit_reversed(80).tolist()) == list(range(80))


def test_rotation_spreads_the_energy_over_all_components():
    x = skewed(500).double()
    form = (x.mT @ x).mean(1)
    R = rotation_of(form)
    torch.testing.assert_close(R.mT @ R, torch.eye(D, dtype=torch.float64)[None])
    torch.testing.assert_close(energies(R.mT, form), torch.ones(1, D, dtype=torch.float64))
    assert float(form.diagonal(dim1=-2, dim2=-1).max()) > 2 * float(form.diagonal(dim1=-2, dim2=-1).mean())


@pytest.mark.parametrize(("clip", "element"), [(0.96, 61), (0.92, 58), (1.0, 63)])
@pytest.mark.parametrize("bits", [2, 4])
def test_codes_equal_to_a_computation_by_hand(clip: float, element: int, bits: int):
    x = skewed(64)
    codec = Oscar(bits, clip=clip, calibration="prompt").fit(x)
    basis = unpacked_basis(**codec.fitted).double()
    y = x.double() @ basis.inverse()
    most = y.abs().sort(-1).values[..., element, None]
    y = y.clamp(-most, most)
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    scale, low = ((high - low) / (2**bits - 1)).half().double(), low.half().double()
    wanted = (low + scale * ((y - low) / scale).round().clamp(0, 2**bits - 1)) @ basis
    got = codec.decode(codec.encode(x), D).double()
    assert float((got - wanted).square().mean() / wanted.square().mean()) < 1e-4


def test_score_weights():
    keys, query = normal(1, 2, 5, 8), normal(1, 2, 7, 8, seed=1)
    of_keys, of_values = score_loss(keys, query)
    for h in range(2):
        form = sum(torch.outer(q, q) for q in query[0, h]) / 7
        torch.testing.assert_close(of_keys.metric[0, h], form)
        scores = (keys[0, h] @ query[0, h].T).square().mean(1)
        torch.testing.assert_close(of_values.weights[0, h], scores)
    assert torch.equal(of_keys.weights, torch.ones(1, 2, 5))


def test_values_follow_their_scores():
    """A direction that only tokens without attention have does not count."""
    x = normal(1, 1, 200, D)
    x[:, :, 100:, 0] += 50
    weights = torch.ones(1, 1, 200)
    weights[..., 100:] = 0
    seen, all_ = (Oscar(side="values").fit_moments(m) for m in (Moments.weighted(x, TokenLoss(weights)), Moments.of(x)))
    form = (x[:, :, :100].double().mT @ x[:, :, :100].double()).squeeze(1)
    even, uneven = (energies(unpacked_basis(**c.fitted)[:, 0], form).std() for c in (seen, all_))
    assert float(even) < 0.1
    assert float(uneven) > 1.5 * float(even)


@pytest.mark.parametrize("rotation", ["layer", "head"])
def test_fit_of_divided_heads_is_that_of_all(rotation):
    x, query = skewed(100, heads=4), skewed(50, heads=4, seed=7)
    loss = score_loss(x, query)[0]
    codec = Oscar(rotation=rotation, calibration="prompt")
    whole = codec.fit_moments(Moments.weighted(x, loss))
    own = Moments.weighted(x[:, 2:], TokenLoss(loss.weights[:, 2:], loss.metric[:, 2:]))

    every = Moments.weighted(x, loss)

    def gather(part: Tensor) -> Tensor:
        """Return the tensor of all heads that `part` belongs to."""
        whole = (every.metric, every.squares, every.total.unsqueeze(2))
        return next(t for t in whole if t is not None and torch.equal(t[:, 2:], part))

    got = HeadShard(2, 2, 4, gather).fit_moments(codec, own)
    for name, tensor in whole.of_heads(2, 2).fitted.items():
        assert torch.equal(got.fitted[name], tensor)


@pytest.mark.parametrize("rotation", ["layer", "head"])
def test_calibration_sees_the_queries_of_the_corpus(llama, tmp_path: Path, rotation: str):
    ids, sinks, forms = prompt(48, batch=3), 2, []

    def see(layer: int, tokens: LayerTokens, call: AttentionCall) -> None:
        if layer == 1:
            heads = tokens[0].shape[1]
            q = call.query[0, :, sinks:].double().unflatten(0, (heads, -1)).flatten(1, 2)
            forms.append(q.mT @ q)

    for row in ids:
        watch_calls(llama, row[None], see)
    recipe = Recipe.parse(f"oscar:rotation={rotation}")
    (found,) = Calibrator(llama, [recipe], Corpus("random", "0" * 64, ids, 0), sinks=sinks, work=tmp_path).run()
    tensors = {name: found.tensors[f"layers.1.keys.{name}"] for name in ("basis", "channels")}
    basis, form = unpacked_basis(**tensors)[0], torch.stack(forms).sum(0)
    form = form if rotation == "head" else form.sum(0, keepdim=True)
    uneven = float(energies(torch.eye(form.shape[-1]).expand_as(form), form).std())
    assert float(energies(basis, form).std()) < 0.3 * uneven


@pytest.mark.parametrize("side", ["keys", "values"])
def test_rotation_costs_little_accuracy(side: Side):
    """At 8 bits the error is that of the integers, so the stored basis is inverted exactly."""
    x = skewed(256)
    codec = Oscar(8, calibration="prompt", side=side).fit(x)
    off = codec.decode(codec.encode(x), D) - x
    assert float(off.square().sum() / x.square().sum()) < 1e-4
