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


def test_centres_of_equal_queries_give_their_logits():
    """If all queries are the same before RoPE, the score of a key is its mean logit over later positions."""
    simulated = benchmark("simulated_rates")
    tokens, dim = 40, 16
    angle = torch.outer(torch.arange(tokens + simulated.FARTHEST).float(), 0.1 ** torch.arange(dim // 2))
    cos, sin = (torch.cat([f(angle)] * 2, dim=-1)[None] for f in (torch.cos, torch.sin))

    def rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
        return x * cos[0, at] + turned * sin[0, at]

    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 1, dim, generator=generator), torch.randn(1, tokens, dim, generator=generator)
    queries = rotated(query.expand(-1, tokens, -1), torch.arange(tokens))
    score, weights = simulated.from_centres(queries, keys, cos, sin)
    later = tokens - 1 + torch.tensor(simulated.DISTANCES)
    logits = rotated(query.expand(-1, len(later), -1), later) @ keys[0].mT / dim**0.5
    mean = logits.mean(1)
    torch.testing.assert_close(score[0], ((mean - mean.mean(-1, keepdim=True)) / mean.std(-1, keepdim=True)).amax(0))
    torch.testing.assert_close(weights[0], logits.softmax(-1).square().mean((0, 1)).sqrt())
