"""Calibration from sums: the same codecs as from all vectors, and stopped runs continue."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import prompt
from tersekv import CompressedCache
from tersekv.cache.coding import Tokens, codec_input
from tersekv.cache.rotary import Rotary
from tersekv.calibration import corpus_moments
from tersekv.calibration.calibrate import Calibrator, Corpus
from tersekv.calibration.gradients import Source, each_gradient, layer_gradients
from tersekv.codecs.trellis import Trellis
from tersekv.errors import UserError
from tersekv.models.rope import Ropes
from tersekv.recipe import Recipe
from tersekv.transforms.moments import Moments

CORPUS = Corpus("random", "0" * 64, prompt(48, batch=3), 0)
SINKS = 2


def calibrator(model, work: Path, recipe: str) -> Calibrator:
    return Calibrator(model, [Recipe.parse(recipe)], CORPUS, sinks=SINKS, work=work)


def vectors(model, source: Source) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all vectors and gradients of the corpus, [1, H, samples·tokens, D]."""
    parts = [layer_gradients(model, ids[None], [source], sinks=SINKS) for ids in CORPUS.windows]
    x, gradient = (torch.cat([p[f"{source.name}.{what}"] for p in parts], dim=2) for what in ("x", "gradient"))
    return x, gradient.float()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_equal_to_fitting_on_all_vectors(models, tmp_path, name: str, side) -> None:
    """gemma3's layers have two rope types, and some have a sliding window."""
    model, layer = models[name], 1
    (found,) = calibrator(model, tmp_path, "trellis:metric=none").run()
    x, gradient = vectors(model, Source(layer, side))
    codec = Trellis(side=side, metric="none")
    if side == "keys":
        before, _ = vectors(model, Source(layer, "keys", True))
        codec = codec.with_mean(before)
        length = CORPUS.windows.shape[1]
        rotary = Rotary(Ropes(model.config, x.shape[-1]).of(layer))
        angles = rotary.angles(SINKS, length - SINKS, x.device)
        x = torch.cat([codec_input(codec, Tokens(part, angles)) for part in x.split(length - SINKS, dim=2)], dim=2)
    wanted = codec.fit_corpus(x, gradient).fitted
    for part in ("mean", "scale"):
        got = found.tensors[f"layers.{layer}.{side}.{part}"].float()
        torch.testing.assert_close(got, wanted[part].float(), rtol=1e-3, atol=1e-4)
    assert f"layers.{layer}.{side}.bits" not in found.tensors


def test_sums_about_a_mean() -> None:
    x = torch.randn(1, 2, 100, 8, generator=torch.Generator().manual_seed(0))
    found = Moments.of(x)
    assert found.metric is None
    mean = x.mean(2).half()
    off = x.double() - mean.double().unsqueeze(2)
    torch.testing.assert_close(found.covariance(mean), off.transpose(-1, -2) @ off / 100)


def test_tokens_count_by_their_gradients() -> None:
    """A tenth of the weight is the same for all tokens."""
    x, g = (torch.randn(1, 2, 100, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    found = Moments.of(x, g, diagonal=True)
    loss = g.double().square().sum(-1)
    weights = 0.1 + 0.9 * loss / loss.mean(-1, keepdim=True)
    squares = torch.einsum("bht,bhti,bhtj->bhij", weights, x.double(), x.double())
    torch.testing.assert_close(found.squares, squares, atol=1e-4, rtol=1e-4)  # summed in float32
    torch.testing.assert_close(found.total, (weights.unsqueeze(-1) * x).sum(2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.metric, g.double().square().sum(2).diag_embed())


@pytest.mark.parametrize(("phase", "at"), [("means", 1), ("samples", 0), ("samples", 2), ("sums", 1)])
def test_stopped_run_continues(llama, tmp_path, monkeypatch, phase: str, at: int) -> None:
    (wanted,) = calibrator(llama, tmp_path / "whole", "trellis").run()

    def stop(now: str, done: int, total: int) -> None:
        if (now, done) == (phase, at):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrator(llama, tmp_path / "stopped", "trellis").run(stop)
    passes = []
    monkeypatch.setattr(corpus_moments, "each_gradient", lambda *a: passes.append(1) or each_gradient(*a))
    again = calibrator(llama, tmp_path / "stopped", "trellis")
    (found,) = again.run()
    assert len(passes) == {"means": 3, "samples": 3 - at, "sums": 0}[phase]
    assert found.digest == wanted.digest
    held = sum(path.stat().st_size for path in again.work.iterdir())
    assert 0 < held < again.work_bytes
    again.clean()
    assert not again.work.exists()


def test_codecs_on_vectors_and_on_sums_share_a_run(llama, tmp_path) -> None:
    together = Calibrator(llama, [Recipe.parse(r) for r in ("trellis", "kvquant:bits=2")], CORPUS, SINKS, 1, tmp_path)
    found = together.run()
    alone = [calibrator(llama, tmp_path / r, r).run()[0] for r in ("trellis", "kvquant:bits=2")]
    assert [one.digest for one in found] == [one.digest for one in alone]


@pytest.mark.parametrize(
    "recipe",
    [
        "qjl:outliers=3,calibration=corpus",
        "qjl:outliers=3,calibration=corpus,pre_rope=true",
        "turboquant:bits=2.5,calibration=corpus",
    ],
)
def test_outlier_channels_are_the_largest_of_the_corpus(llama, tmp_path, recipe: str) -> None:
    """In the vectors that the codec encodes: keys before RoPE have other large channels."""
    (found,) = calibrator(llama, tmp_path, recipe).run()
    for layer, plan in found.plans(Recipe.parse(recipe), llama.config).items():
        for codec in (plan.keys, plan.values):
            if codec.fits_on is None:
                assert codec.side == "values"
                continue
            x, _ = vectors(llama, Source(layer, codec.side, codec.pre_rope))
            n = 3 if recipe.startswith("qjl") else x.shape[-1] // 4
            largest = x.square().mean(2).topk(n).indices.sort(-1).values
            assert torch.equal(codec.fitted["channels"].long(), largest)


def test_outlier_channels_of_one_file_serve_other_rates(llama, tmp_path) -> None:
    recipe = "turboquant:bits=2.5,calibration=corpus"
    (found,) = calibrator(llama, tmp_path, recipe).run()
    for other in (recipe, "turboquant:bits=3.25,variant=prod,calibration=corpus"):
        other = f"window:recent=0,start=0+{other}"
        found.check(Recipe.parse(other), llama.config)
        cache = CompressedCache(llama.config, other, found)
        with torch.no_grad():
            llama(prompt(96), past_key_values=cache)
        assert cache.footprint().parts["codes"] > 0
    with pytest.raises(UserError, match="was made for recipe 'turboquant:calibration=corpus"):
        found.check(Recipe.parse("qjl:calibration=corpus"), llama.config)
