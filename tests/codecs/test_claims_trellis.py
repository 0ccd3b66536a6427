"""Claims of docs/methods/trellis.md about the codec `trellis`, in numbers."""

from __future__ import annotations

import itertools

import pytest
import torch

from tersekv.codecs.codebooks.bits import SQUARED_ERROR, allotted
from tersekv.codecs.codebooks.trellis import TRAINED, scalar_entries, squared_error, trained, trellis_entries
from tersekv.codecs.trellis import Trellis
from tersekv.kernels import backends
from tersekv.layouts.mean_removed import MeanRemoved, RotatedMean
from tersekv.transforms.rope import standard_rope


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", range(1, 9))
def test_squared_errors_of_the_shipped_tables(bits):
    error = squared_error(bits, backends.encode_trellis, trellis_entries("cpu"), vectors=3000, dim=64)
    assert error == pytest.approx(SQUARED_ERROR["trellis"][bits], rel=0.05)
    assert 4.0**-bits < error
    if bits < TRAINED:  # With six bits both codebooks are equally good; more bits use a scalar one.
        assert error < 0.8 * SQUARED_ERROR["scalar"][bits]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_scalar_tables_are_lloyd_max_in_the_same_stream(bits):
    """Up to the precision of integer costs, which tells two entries of equal distance by chance."""
    y = normal(1, 200, 64)
    widths = torch.full((1, 64), bits, dtype=torch.uint8)
    tables = scalar_entries("cpu")
    windows = backends.encode_trellis(y, torch.ones(1, 64), widths, tables)
    nearest = (y.unsqueeze(-1) - tables[bits].unique()).abs().min(-1).values
    error = (y - tables[bits][windows.long()]).square().mean()
    torch.testing.assert_close(error, nearest.square().mean(), rtol=5e-3, atol=0)


def test_training_lowers_the_error():
    tables = torch.zeros(9, 256)
    errors = []
    for rounds in (0, 6):
        tables[2] = trained(2, backends.encode_trellis, seed=0, rounds=rounds, vectors=800, dim=64)
        errors.append(squared_error(2, backends.encode_trellis, tables, vectors=800, dim=64))
    assert errors[1] < 0.99 * errors[0]
    assert errors[1] < SQUARED_ERROR["scalar"][2] * 0.75


@pytest.mark.parametrize("total", [3, 7, 12])
def test_allotted_bits_are_the_best_of_all(total):
    variance = torch.tensor([9.0, 2.5, 1.0, 0.05])
    error = SQUARED_ERROR["trellis"]
    best = min(
        (sum(float(v) * error[b] for v, b in zip(variance, bits, strict=True)), bits)
        for bits in itertools.product(range(9), repeat=4)
        if sum(bits) == total
    )
    assert tuple(allotted(variance, total, error).tolist()) == best[1]


def test_error_of_correlated_vectors_is_that_of_their_components():
    """Σ λ_d·ε(b_d) for normal vectors with known variances, in any basis."""
    lengths = 2.0 ** -torch.arange(32.0).div(4)
    rotation = torch.linalg.qr(normal(32, 32, seed=1))[0]
    x = (normal(1, 1, 2048, 32, seed=2) * lengths.sqrt()) @ rotation
    codec = Trellis(2.0, calibration="prompt", side="values").fit(x)
    error = (codec.decode(codec.encode(x), 32) - x).square().sum(-1).mean()
    bits = allotted(lengths, 64, SQUARED_ERROR["trellis"]).long()
    expected = (lengths * torch.tensor(SQUARED_ERROR["trellis"])[bits]).sum()
    assert float(error) == pytest.approx(float(expected), rel=0.12)
    plain = Trellis(2.0, basis="rotation", calibration="prompt", side="values").fit(x)
    assert float(error) < 0.6 * float((plain.decode(plain.encode(x), 32) - x).square().sum(-1).mean())


def test_constant_part_of_keys_before_rope_costs_no_bits():
    """Keys R_n(μ + noise) are coded as well as the noise alone."""
    D, T = 32, 512
    rope = standard_rope(D)
    cos, sin = rope.cos_sin(0, T, T, torch.device("cpu"))
    noise, mean = normal(1, 2, T, D), 8 * normal(1, 2, 1, D, seed=3)
    keys = rope.apply(noise + mean, cos[None], sin[None])
    codec = Trellis(2.0, calibration="prompt").with_mean(rope.invert(keys, cos[None], sin[None]))
    left = keys - rope.apply(codec.fitted["mean"].float().unsqueeze(2).expand(-1, -1, T, -1), cos[None], sin[None])
    codec = codec.fit(left)
    view = codec.view(codec.encode(left), D)
    centred = MeanRemoved(view, RotatedMean(codec.fitted["mean"], rope, rope.angles(0, T)))
    error = (centred.decode() - keys).square().mean()
    assert float(error) < 1.3 * SQUARED_ERROR["trellis"][2]
    with_mean = Trellis(2.0, centre=False, calibration="prompt").fit(keys)
    assert float(error) < 0.5 * float((with_mean.decode(with_mean.encode(keys), D) - keys).square().mean())
    query = normal(1, 2, 3, D, seed=4)
    torch.testing.assert_close(
        centred.inner.scores(centred.query(query)), query @ centred.decode().transpose(-1, -2), rtol=1e-4, atol=1e-3
    )


def test_metric_moves_bits_to_directions_that_affect_the_loss():
    x = normal(1, 1, 1024, 32)
    gradient = normal(1, 1, 1024, 32, seed=5)
    gradient[..., :8] *= 10
    heeded = Trellis(1.5, side="values").fit_corpus(x, gradient)
    ignored = Trellis(1.5, side="values", metric="none").fit_corpus(x, gradient)
    errors = [(c.decode(c.encode(x), 32) - x)[..., :8].square().mean() for c in (heeded, ignored)]
    assert float(errors[0]) < 0.5 * float(errors[1])


def test_a_short_prompt_leaves_bits_for_later_tokens():
    """Fitted on a few tokens in a subspace, vectors outside it are still coded."""
    few = normal(1, 1, 16, 32) @ torch.diag((torch.arange(32) < 8).float())
    codec = Trellis(3.0, calibration="prompt", side="values").fit(few)
    later = normal(1, 1, 64, 32, seed=6)
    error = (codec.decode(codec.encode(later), 32) - later).square().mean() / later.square().mean()
    assert float(error) < 0.5


def test_bits_go_to_layers_that_affect_the_loss():
    """Over layers and sides the total of bits does not grow, and the predicted loss falls."""
    codecs = []
    for layer, loud in enumerate((1.0, 30.0, 0.2)):
        x = normal(1, 2, 512, 32, seed=layer)
        codecs.append(Trellis(2.0, side="values").fit_corpus(x, loud * normal(1, 2, 512, 32, seed=9 + layer)))
    settled = Trellis.share_across_layers(codecs)
    bits = [int(codec.fitted["bits"].sum()) for codec in settled]
    assert bits[1] > bits[0] > bits[2]
    assert sum(bits) <= sum(int(codec.fitted["bits"].sum()) for codec in codecs)
    assert sum(bits) > 0.9 * sum(int(codec.fitted["bits"].sum()) for codec in codecs)

    def foretold(some: list) -> float:
        error = torch.tensor(SQUARED_ERROR["trellis"], dtype=torch.float64)
        return sum(float((c.losses() * error[c.fitted["bits"].long()]).sum()) for c in some)

    assert foretold(settled) < 0.6 * foretold(codecs)
    for codec in settled:
        x = normal(1, 2, 64, 32)
        assert codec.layout(32).planes["stream"].shape[0] == codec.encode(x)["stream"].shape[3]
        assert codec.decode(codec.encode(x), 32).isfinite().all()


def test_layers_without_gradients_keep_their_bits():
    codecs = [Trellis(2.0, metric="none").fit_corpus(normal(1, 1, 64, 32), normal(1, 1, 64, 32)) for _ in range(2)]
    for shared, alone in zip(Trellis.share_across_layers(codecs), codecs, strict=True):
        assert torch.equal(shared.fitted["bits"], alone.fitted["bits"])
