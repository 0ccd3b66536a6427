"""Bias correction of packed tokens' softmax weights: the term, the kernels, the stores."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import tersekv
from conftest import prompt
from tersekv.attention.read import KERNEL_ROWS, AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import Observed
from tersekv.errors import UserError
from tersekv.kernels import attend as attend_operator
from tersekv.kernels import backends
from tersekv.kernels.cpu import why_not_built
from tersekv.models.config import cache_shape
from tersekv.recipe import Recipe
from tersekv.sizes.estimate import predict
from tersekv.transforms.rope import standard_rope
from test_store import tokens

D = 64
KINDS = [
    "kivi:bits=2",  # no linear map
    "kivi:bits=2,pre_rope=true",
    "turboquant:bits=2",  # one rotation for all heads
    "trellis:bits=1,calibration=prompt",  # a quantised basis, and the query itself after it
    "trellis:bits=2,calibration=prompt,basis=channels,centre=false",
    "kvquant:bits=2,calibration=prompt",  # outliers
    "qjl",
]


def filled(recipe: str, keys: Tensor, values: Tensor, padding: Tensor | None = None) -> LayerStore:
    store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values, None, standard_rope(D))
    store.append(keys, values, padding)
    return store


def log_sum_exp(store: LayerStore, query: Tensor) -> Tensor:
    """Return the log-sum-exp of the packed tokens, [B, H, R]."""
    return attend_operator.attend.reference(query, (), store.pages(), None, None, D**-0.5, parts=True)[1]


@pytest.mark.parametrize(
    ("recipe", "sign"),
    [
        ("kivi:bits=2", -1),  # rounded to the levels from minimum to maximum: more variance than the keys
        ("qjl:outliers=0", -1),  # unbiased: a sketch adds variance
        ("trellis:bits=1,calibration=prompt,metric=none", 1),  # the mean of what has the same code
        ("turboquant:bits=2", 1),
    ],
)
def test_the_log_sum_exp_of_normal_keys_is_closer(recipe, sign):
    """The correction of the average is what theory says: at least 60 % of the bias is gone."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.linspace(0.5, 1.5, D)
    keys = torch.randn(1, 2, 8192, D, generator=generator) * spread
    values, query = torch.randn(keys.shape, generator=generator), torch.randn(1, 64, 1, D, generator=generator)
    exact = torch.logsumexp(query.reshape(1, 2, 32, D) @ keys.transpose(-1, -2) * D**-0.5, dim=-1)
    biases = {}
    for share in ("off", "half", "full"):
        store = filled(f"window:sinks=0,recent=0,bias_correction={share}+{recipe}", keys, values)
        assert store.packed_tokens == 8192
        biases[share] = float((exact - log_sum_exp(store, query)).mean())
    assert abs(biases["off"]) > 0.02
    assert abs(biases["full"]) < 0.4 * abs(biases["off"])
    assert biases["half"] == pytest.approx((biases["off"] + biases["full"]) / 2, abs=1e-5)
    assert biases["off"] * sign > 0
    assert float(store.tiers[0].keys.lost.mean()) * sign > 0


@pytest.mark.parametrize("padding", [None, (40, 0)], ids=["", "padded"])
@pytest.mark.parametrize("recipe", KINDS)
def test_kernels_equal_the_reference(recipe, padding):
    """One query of a decode step by kernels, many queries decoded block by block, and the reference."""
    if reason := why_not_built():
        pytest.skip(reason)
    padded = None if padding is None else torch.tensor(padding)
    keys, values = tokens(400, B=2, D=D)
    store = filled(f"window:recent=32,bias_correction=full+{recipe}", keys, values, padded)
    off = filled(f"window:recent=32+{recipe}", keys, values, padded)
    query = 3 * torch.randn(2, 4, KERNEL_ROWS + 1, D, generator=torch.Generator().manual_seed(0))
    seen = torch.arange(400) >= (torch.zeros(2) if padded is None else padded)[:, None]
    mask = seen[:, None].expand(2, KERNEL_ROWS + 1, 400)
    with backends.forced("reference"):
        blocks = attend_store(store, AttentionCall(query, mask, 0.125))
        one = attend_store(store, AttentionCall(query[:, :, :1], mask[:, :1], 0.125))
        without = attend_store(off, AttentionCall(query[:, :, :1], mask[:, :1], 0.125))
    got = attend_store(store, AttentionCall(query[:, :, :1], mask[:, :1], 0.125))
    torch.testing.assert_close(one, blocks[:, :1], rtol=1e-4, atol=1e-5)
    change = (one - without).norm()
    assert (got - one).norm() <= 0.02 * one.norm()  # the bound of bfloat16 products
    assert change > 3 * (got - one).norm()  # so the bound would notice a missing term


def test_padding_is_not_measured():
    """A padded row measures the same as without its padding, here of whole blocks."""
    keys, values = tokens(400, B=2, D=D)
    recipe = "window:start=0,recent=32,bias_correction=full+kivi:bits=2"
    padded = filled(recipe, keys, values, torch.tensor([192, 0]))
    alone = filled(recipe, keys[:1, :, 192:], values[:1, :, 192:])
    torch.testing.assert_close(padded.tiers[0].keys.lost[0], alone.tiers[0].keys.lost[0])


def test_rows_state_and_rollback():
    """Rows are selected, a state is restored, and a store without tokens measures again."""
    keys, values = tokens(400, B=3, D=D)
    recipe = "window:recent=32,bias_correction=half+kivi:bits=2"
    store = filled(recipe, keys, values)
    lost = store.tiers[0].keys.lost
    assert lost.shape == (3, 2, D)
    assert torch.equal(store.tiers[0].keys.correction, lost / 4)
    other = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values, None, standard_rope(D))
    other.restore(store.state())
    assert torch.equal(other.tiers[0].keys.lost, lost)
    query = torch.randn(3, 4, 1, D)
    same = [attend_store(s, AttentionCall(query, None, 0.125)) for s in (store, other, copy.deepcopy(store))]
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    store.crop(200)
    assert torch.equal(store.tiers[0].keys.lost, lost)  # as other data fitted on the prompt
    store.select(torch.tensor([2, 0]))
    assert torch.equal(store.tiers[0].keys.lost, lost[[2, 0]])
    store.crop(200)
    assert store.tiers[0].keys.lost is None
    state = other.state()
    state["tiers"][0]["sides"][0]["lost"] = torch.full((3, 2, D), torch.nan)
    with pytest.raises(UserError, match="lost"):
        LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values, None, standard_rope(D)).restore(state)


def test_states_without_correction_have_no_new_entry():
    keys, values = tokens(400, D=D)
    assert "lost" not in filled("kivi:bits=2", keys, values).state()["tiers"][0]["sides"][0]


@pytest.mark.parametrize("policy", ["snapkv", "streaming"])
def test_policies_that_evict(policy):
    """The correction is measured on the tokens that a head has kept, and changes the output."""
    keys, values = tokens(400, D=D)
    votes = torch.rand(1, 2, 400, generator=torch.Generator().manual_seed(0))
    outs = []
    for share in ("off", "full"):
        recipe = f"{policy}:budget=200,recent=16,bias_correction={share}+kivi:bits=2"
        store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values, None, standard_rope(D))
        store.append(keys, values, None, Observed(votes))
        outs.append(attend_store(store, AttentionCall(torch.ones(1, 4, 1, D), None, 0.125)))
    assert float(store.tiers[0].keys.lost.mean()) < 0
    assert store.packed_tokens
    assert not torch.allclose(*outs, rtol=0.01)


def test_both_rates_of_a_policy_that_evicts():
    """Each rate has its own lost variance, which is larger with fewer bits, and its own correction."""
    keys, values = tokens(600, D=D)
    recipe = "streaming:budget=500,recent=16,rest=1,bias_correction=full+trellis:bits=4,calibration=prompt,centre=false"
    store = LayerStore(Recipe.parse(recipe).plan(0, 1), keys, values, None, standard_rope(D))
    store.append(keys, values)
    high, low = (tier.keys.lost for tier in store.tiers)
    assert 0 < float(high.mean()) < float(low.mean()) / 4
    assert {id(page.correction) for page in store.packed_pages()} == {id(tier.keys.correction) for tier in store.tiers}


@pytest.mark.parametrize("policy", ["window:", "snapkv:budget=0.5,", "mixed:rest=1,", "h2o:budget=0.8,rest=1,"])
def test_bytes_are_counted_and_generation_runs(models, policy):
    """Beams, a batch with padding, and the estimate, on a small model."""
    model = models["llama"]
    recipe = f"{policy}recent=16,bias_correction=half+kivi:bits=2"
    with tersekv.compress(model, recipe), torch.no_grad():
        cache = tersekv.CompressedCache(model.config, recipe)
        model(prompt(300, batch=2), past_key_values=cache)
        ids = prompt(100, batch=2)
        mask = torch.ones_like(ids)
        mask[0, :30] = 0
        options = {"attention_mask": mask, "num_beams": 2, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert model.generate(ids, **options).shape == (2, 105)
    expected = predict(cache_shape(model.config), recipe, 300, batch=2)
    assert cache.footprint().parts["tables"] == expected.parts["tables"] > 0


def test_errors_name_what_is_allowed():
    with pytest.raises(UserError, match="bias_correction=most is not allowed; choose one of off, half, full"):
        Recipe.parse("window:bias_correction=most+kivi")
    with pytest.raises(UserError, match="variant=kcenter"):
        Recipe.parse("subgen:variant=stream,bias_correction=half+kivi")
    assert str(Recipe.parse("window:bias_correction=half+kivi:bits=2")) == "window:bias_correction=half+kivi:bits=2"
