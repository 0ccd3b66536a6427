"""Rates that benchmarks/token_rates.py gives to tokens."""

import pytest
import torch

from conftest import benchmark


class Packed:
    sinks, packed = 2, 64


@pytest.fixture
def importance():
    return [torch.rand(3, 70, generator=torch.Generator().manual_seed(0)).pow(6)]


def test_water_filling_meets_the_mean_rate_and_prefers_important_tokens(importance):
    simulated = benchmark("simulated_rates")
    (rates,) = simulated.water_filled(importance, Packed, 2, 0.1)
    assert rates.shape == (3, 64)
    assert set(rates.unique().tolist()) <= set(simulated.RATES)
    assert bool((rates.mean(-1) <= 2).all())
    assert bool((rates.mean(-1) > 1.9).all())
    order = importance[0][:, 2:66].argsort(-1)
    assert bool((rates.gather(-1, order).diff() >= 0).all())


def test_fixed_shares_are_the_same_in_every_head(importance):
    simulated = benchmark("simulated_rates")
    (rates,) = simulated.fixed(importance, Packed, ((4, 1 / 8), (3, 1 / 2), (2, 1)))
    assert [(rates == r).sum(-1).tolist() for r in (4, 3, 2)] == [[8] * 3, [32] * 3, [24] * 3]
    most = importance[0][:, 2:66].argmax(-1, keepdim=True)
    assert rates.gather(-1, most).eq(4).all()


def test_unusual_norms_are_found():
    simulated = benchmark("simulated_rates")
    x = torch.randn(1, 2, 50, 64, generator=torch.Generator().manual_seed(0))
    x[0, 1, 7] *= 30
    x[0, 0, 9] /= 30
    assert simulated.unusual(x).argmax(-1).tolist() == [9, 7]
