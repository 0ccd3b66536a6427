"""SubGen's claims (arXiv 2402.06082), numerically.

Samples are uniform and ℓ₂-proportional for any division of the stream into calls. Numerator and
denominator are unbiased, Theorem 1's bound holds, and there are no more clusters than in the
stream.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.clusters import Clusters, Head, merged
from tersekv.cache.layer import LayerStore
from tersekv.cache.sampled_tokens import Reservoir, counts
from tersekv.kernels.softmax import attend_weighted
from tersekv.policies.subgen import SubGen, farthest_first
from tersekv.recipe import Recipe
from test_attention import dense

TRIALS = 4000
"""Number of independent heads in one batch."""


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """Return the deviation of Pearson's statistic from its mean, in standard deviations.

    It is computed over the last axis and summed over all rows.
    """
    statistic = float(((observed - expected).square() / expected).sum())
    freedom = observed.numel() - observed.shape[:-1].numel()
    return (statistic - freedom) / math.sqrt(2 * freedom)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CUTS = [[20], [1] * 20, [7, 1, 12]]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_value_slots_are_proportional_to_squared_norms(cuts):
    weights = torch.arange(20, dtype=torch.float64) ** 2  # the first has norm zero
    reservoir, generator = Reservoir.empty(1, TRIALS, 3, torch.device("cpu")), random(0)
    for part in torch.arange(20).split(cuts):
        block = weights[part].expand(1, TRIALS, -1)
        reservoir = reservoir.extended(block, part.to(torch.int32).expand(1, TRIALS, -1), generator)
    found = torch.bincount(reservoir.slots.flatten(), minlength=20).double()
    assert found[0] == 0
    assert chi_square(found[None, 1:], 3 * TRIALS * (weights / weights.sum())[None, 1:]) < 4
    assert chi_square(found[None, 1:], torch.full((1, 19), 3 * TRIALS / 19.0)) > 40
    assert float(reservoir.weight[0, 0]) == float(weights.sum())


def test_value_slots_are_independent():
    """Two slots hold the same token as often as two independent draws do."""
    reservoir, generator = Reservoir.empty(1, TRIALS, 2, torch.device("cpu")), random(1)
    for part in torch.arange(20, dtype=torch.int32).split(4):
        ones = torch.ones(1, TRIALS, 4, dtype=torch.float64)
        reservoir = reservoir.extended(ones, part.expand(1, TRIALS, -1), generator)
    same = float((reservoir.slots[..., 0] == reservoir.slots[..., 1]).double().mean())
    assert same == pytest.approx(1 / 20, abs=4 * math.sqrt(0.05 * 0.95 / TRIALS))


def test_values_of_norm_zero_are_never_sampled():
    reservoir = Reservoir.empty(1, 1, 5, torch.device("cpu"))
    positions, zeros = torch.arange(4, dtype=torch.int32).view(1, 1, 4), torch.zeros(1, 1, 4, dtype=torch.float64)
    reservoir = reservoir.extended(zeros, positions, random(0))
    assert reservoir.slots.tolist() == [[[-1] * 5]]
    assert counts(positions, reservoir.slots).sum() == 0


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_cluster_slots_are_uniform(cuts):
    """With two interleaved clusters, every slot is uniform over its own cluster's keys."""
    heads = 300
    near, far = torch.zeros(4), torch.full((4,), 9.0)
    which = torch.tensor([0, 1, 0, 0, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0], dtype=torch.bool)
    keys = torch.where(which[:, None], far, near).expand(1, heads, -1, -1)
    clusters, generator = Clusters.empty(keys, 8, 1.0, None), random(2)
    for part in torch.arange(20).split(cuts):
        clusters = clusters.extended(keys[:, :, part], part.to(torch.int32).expand(1, heads, -1), generator)
    assert clusters.members[0].tolist() == [[13, 7]] * heads
    for index, members in enumerate([(~which).nonzero(), which.nonzero()]):
        found = torch.bincount(clusters.slots[0, :, index].flatten(), minlength=20).double()[members.squeeze(1)]
        assert found.sum() == heads * 8
        assert chi_square(found[None], torch.full_like(found, heads * 8 / len(found))[None]) < 4


def test_merged_clusters_are_uniform():
    found = torch.zeros(12, dtype=torch.float64)
    for seed in range(1500):
        slots = torch.cat([torch.randint(0, 9, (1, 4), generator=random(seed)), torch.randint(9, 12, (1, 4))]).int()
        head = Head(torch.tensor([[0.0], [1.0]]), torch.tensor([9, 3]), slots, 0.0)
        whole = merged(head, random(seed + 10_000))
        assert (whole.members.tolist(), whole.delta) == ([12], 1.0)
        found += torch.bincount(whole.slots.flatten(), minlength=12)
    assert chi_square(found[None], torch.full((1, 12), found.sum() / 12, dtype=torch.float64)) < 4


@pytest.mark.parametrize("block", [1, 50, 1000])
def test_no_more_clusters_than_a_clusterable_stream_has(block):
    """Keys in m balls of diameter δ give at most m representatives for any division of the stream
    (§2)."""
    m, D = 30, 16
    generator = random(3)
    middles = torch.randn(m, D, generator=generator) * 3
    directions = torch.nn.functional.normalize(torch.randn(1000, D, generator=generator), dim=-1)
    keys = (middles[torch.randint(m, (1000,), generator=generator)] + 0.25 * directions)[None, None]
    positions = torch.arange(1000, dtype=torch.int32)[None, None]
    clusters = Clusters.empty(keys, 2, 0.5001, None)
    for start in range(0, 1000, block):
        part = slice(start, start + block)
        clusters = clusters.extended(keys[:, :, part], positions[:, :, part], generator)
    assert clusters.centers.shape[2] <= m
    assert int(clusters.members.sum()) == 1000
    nearest = torch.cdist(keys[0, 0], clusters.centers[0, 0]).amin(1)
    assert nearest.max() <= 0.5001


def test_the_cluster_budget_is_not_exceeded():
    keys = torch.randn(1, 2, 900, 8, generator=random(4))
    clusters = Clusters.empty(keys, 3, 0.0, 40)
    for part in torch.arange(900).split(100):
        clusters = clusters.extended(keys[:, :, part], part.to(torch.int32).expand(1, 2, -1), random(int(part[0])))
        assert clusters.centers.shape[2] <= 40
    assert clusters.members.sum(-1).tolist() == [[900, 900]]
    assert (clusters.members > 0).sum(-1).min() > 20
    assert (clusters.slots >= 0).all()
    assert torch.isfinite(clusters.delta).all()


def sketch(keys: Tensor, values: Tensor, s: int, t: int, delta: float) -> LayerStore:
    """Return Algorithm 1 alone: no sinks, no window, exact tokens. Each head is one trial."""
    policy = f"subgen:variant=stream,sinks=0,recent=0,exact=fp32,delta={delta},slots={t},budget={2 * s}"
    store = LayerStore(Recipe.parse(f"{policy}+exact:dtype=fp32").plan(0, 1), keys, values)
    assert store.estimates
    store.append(keys, values)
    assert store.recent.tokens == 0
    return store


def sums(store: LayerStore, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return z as direction [trials, D] and log of its factor [trials], and log τ [trials], for
    query [trials, D]."""
    above, outs, below = [], [], []
    for part in store.weighted_segments():
        scores = part.keys.scores(query[None, :, None])
        value = None if part.values is None else part.values.decode()
        weights = [None if w is None else w.masked_fill(part.positions < 0, -torch.inf) for w in part[3:]]
        out, top, bottom = attend_weighted(scores, value, None, 1.0, None, *weights)
        if out is not None:
            outs.append(out[0, :, 0])
            above.append(top[0, :, 0])
        else:
            below.append(bottom[0, :, 0])
    top = torch.logsumexp(torch.stack(above), 0)
    z = sum(out * (a - top).exp().unsqueeze(-1) for out, a in zip(outs, above, strict=True))
    return z, top, torch.logsumexp(torch.stack(below), 0)


def stream(n: int, D: int, trials: int, spread: float, seed: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Return clustered keys, values of very different norms, and a query, equal for every trial."""
    generator = random(seed)
    middles = torch.nn.functional.normalize(torch.randn(6, D, generator=generator), dim=-1)
    noise = torch.nn.functional.normalize(torch.randn(n, D, generator=generator), dim=-1)
    keys = middles[torch.randint(6, (n,), generator=generator)] + spread * noise
    values = torch.randn(n, D, generator=generator) * torch.rand(n, 1, generator=generator).exp()
    query = torch.nn.functional.normalize(torch.randn(D, generator=generator), dim=-1)
    return keys.expand(1, trials, -1, -1), values.expand(1, trials, -1, -1), query.expand(trials, -1)


def test_numerator_and_denominator_are_unbiased():
    keys, values, query = stream(120, 8, 600, 0.6)
    store = sketch(keys, values, 8, 2, 0.5)
    z, top, bottom = sums(store, 2 * query)
    exact = (keys[0, 0] @ (2 * query[0])).exp()
    for estimate, truth in (
        (bottom.exp().unsqueeze(-1), exact.sum()[None]),
        (z * top.exp().unsqueeze(-1), exact @ values[0, 0]),
    ):
        error = estimate.mean(0) - truth
        standard = estimate.std(0) / math.sqrt(len(estimate))
        assert (error.abs() < 4 * standard).all()
        assert (standard < 0.2 * truth.norm()).all()


@pytest.mark.parametrize("epsilon", [0.5, 0.25])
def test_theorem_1(epsilon):
    """‖z/τ − Attn‖ ≤ ε·‖softmax‖₂·‖V‖_op in 99 % of trials, with t = ε⁻²·e^{2δr}·log n and s =
    ε⁻²·D."""
    n, D, delta, trials = 400, 8, 0.2, 300
    keys, values, query = stream(n, D, trials, delta / 2)
    t, s = math.ceil(epsilon**-2 * math.exp(2 * delta) * math.log(n)), math.ceil(16 * epsilon**-2 * D)
    store = sketch(keys, values, s, t, delta * 1.001)
    assert store.chosen[0].clusters.centers.shape[2] <= 6
    z, top, bottom = sums(store, query)
    estimate = z * (top - bottom).exp().unsqueeze(-1)
    p = torch.softmax(keys[0, 0] @ query[0], 0)
    bound = epsilon * p.norm() * torch.linalg.matrix_norm(values[0, 0], 2)
    errors = (estimate - p @ values[0, 0]).norm(dim=-1)
    assert (errors <= bound).double().mean() >= 0.99
    assert errors.median() > 0.02 * bound  # the bound is not trivially large


def test_slots_refer_to_held_tokens():
    keys, values, _ = stream(500, 8, 3, 0.5)
    recipe = "subgen:variant=stream,recent=10,budget=200+kivi:bits=4,group=8"
    store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values)
    for start, stop in [(0, 200), *((i, i + 1) for i in range(200, 400)), (400, 500)]:
        store.append(keys[:, :, start:stop], values[:, :, start:stop])
        for i, slots in enumerate((store.chosen[0].reservoir.slots, store.chosen[0].clusters.slots.flatten(2))):
            for head in range(3):
                held = store.chosen[0].positions(i)[0, head]
                assert set(held[held >= 0].tolist()) == set(slots[0, head].tolist()) - {-1}
    assert store.chosen[0].positions(2)[0, 0].tolist() == [0, 1, 2, 3]
    assert store.chosen[0].clusters.members.sum(-1).tolist() == [[500 - 4 - store.recent.tokens] * 3]


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("recent", [0, 16])
def test_nothing_overflows(size, recent):
    """With scores of ±10⁴, values of norm zero or one token, results are finite and no longer than
    the longest value."""
    generator = random(6)
    keys, values = torch.randn(1, 2, 300, 8, generator=generator), torch.randn(1, 2, 300, 8, generator=generator)
    values[:, :, ::3] = 0
    recipe = f"subgen:variant=stream,recent={recent},sinks=0,exact=fp32,budget=80+exact:dtype=fp32"
    for n in (1, 2, 40, 300):
        store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values)
        store.append(keys[:, :, :n], values[:, :, :n])
        query = torch.nn.functional.normalize(keys[:, :, :1], dim=-1).repeat_interleave(2, 1)
        out = attend_store(store, AttentionCall(query * size, None, 1.0))
        assert torch.isfinite(out).all()
        assert out.norm(dim=-1).max() <= values.norm(dim=-1).max() * 1.0001


def test_a_generated_value_may_be_longer_than_those_of_the_prompt():
    keys, values = (torch.randn(1, 2, 305, 8, generator=random(seed)) for seed in (8, 9))
    keys[:, :, -1] *= 5
    values[:, :, 300:] *= 50
    store = LayerStore(
        Recipe.parse("subgen:variant=stream,recent=32,budget=80+exact:dtype=fp32").plan(0, 1), keys, values
    )
    for start, stop in [(0, 300), *((i, i + 1) for i in range(300, 305))]:
        store.append(keys[:, :, start:stop], values[:, :, start:stop])
    query = torch.nn.functional.normalize(keys[:, :, -1:], dim=-1).repeat_interleave(2, 1) * 1e4
    out = attend_store(store, AttentionCall(query, None, 1.0))
    torch.testing.assert_close(out.squeeze(1), values[:, :, -1].repeat_interleave(2, 1), atol=0.3, rtol=0.02)


def test_a_first_call_that_is_too_short_for_the_budget_of_later_ones_is_said():
    keys = torch.randn(1, 2, 4040, 8, generator=random(3))
    store = LayerStore(Recipe.parse("subgen:variant=stream,recent=8+exact").plan(0, 1), keys, keys)
    store.append(keys[:, :, :40], keys[:, :, :40])
    with pytest.warns(UserWarning, match="has 1 samples of values, which its first call .* 4,040 tokens has 499"):
        store.append(keys[:, :, 40:], keys[:, :, 40:])


def test_all_values_zero():
    keys = torch.randn(1, 2, 100, 8, generator=random(7))
    store = LayerStore(Recipe.parse("subgen:variant=stream,recent=8+exact").plan(0, 1), keys, keys * 0)
    store.append(keys, keys * 0)
    assert attend_store(store, AttentionCall(keys[:, :, :1], None, 1.0)).abs().max() == 0


def test_the_error_falls_with_the_budget():
    keys, values, query = stream(2000, 16, 12, 0.4)
    truth = dense(
        query[None, :, None], keys, values, torch.ones(1, 1, 2000, dtype=torch.bool), AttentionCall(query, None, 4.0)
    )
    errors = []
    for budget in (60, 240, 960):
        recipe = f"subgen:variant=stream,recent=8,sinks=0,budget={budget}+exact"
        store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values)
        store.append(keys, values)
        errors.append(
            float((attend_store(store, AttentionCall(query[None, :, None], None, 4.0)) - truth).norm(dim=-1).mean())
        )
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2]


def test_k_center_is_gonzalez():
    """Each center is the key farthest from those before. The radius is at most twice the known
    optimum."""
    keys = torch.randn(200, 4, generator=random(8))
    ranks = farthest_first(keys[None, None], torch.ones(1, 1, 200, dtype=torch.bool), torch.zeros(1, 1, 200).bool(), 12)
    order = ranks[0, 0].argsort(descending=True)[:12].tolist()
    assert order[0] == 0
    for i in range(1, 12):
        distances = torch.cdist(keys, keys[order[:i]]).amin(1)
        assert order[i] == int(distances.argmax())
    assert (ranks == -1).sum() == 188


def test_k_center_starts_from_tokens_that_are_always_kept():
    keys, alive = torch.randn(1, 2, 50, 4, generator=random(9)), torch.ones(1, 2, 50, dtype=torch.bool)
    alive[0, 1, 40:] = False
    centers = torch.zeros(1, 2, 50, dtype=torch.bool)
    centers[0, 0, :3] = True
    ranks = farthest_first(keys, alive, centers, 10)
    assert ranks[0, 0, :3].tolist() == [math.inf] * 3
    first = torch.cdist(keys[0, 0], keys[0, 0, :3]).amin(1).argmax()
    assert ranks[0, 0].masked_fill(centers[0, 0], -1).argmax() == first
    assert (ranks[0, 1, 40:] == -1).all()


def test_sizes_follow_the_budget():
    policy = SubGen(variant="stream", budget=1000, recent=100, sinks=4, slots=4)
    assert policy.sizes(1000) == (448, 179)
    assert SubGen(variant="stream", recent=100).sizes(10) == (1, 1)
