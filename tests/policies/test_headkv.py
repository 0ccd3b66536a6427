"""HeadKV: budgets and kept tokens against the paper's formula, and the importance of heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import tersekv
from conftest import MODELS, prompt
from tersekv import cli
from tersekv.attention.read import AttentionCall, attend_store
from tersekv.cache.layer import LayerStore
from tersekv.cache.parallel import HeadShard
from tersekv.calibration.calibration import SCORES, Calibration, Made
from tersekv.calibration.find import calibration_for, default_folder, profile_place
from tersekv.calibration.head_scores import AnsweredPrompt, measure
from tersekv.errors import UserError
from tersekv.models.fingerprint import architecture, fingerprint
from tersekv.policies.headkv import HeadKV, head_budgets
from tersekv.recipe import Recipe
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict
from test_claims_selection import feed, kept
from test_cli import run_json
from test_saved import goes_on_alike, read, singles
from test_store import tokens

EXACT = "exact:dtype=fp32"


def uneven(layers: int = 4, heads: int = 2, seed: int = 0) -> torch.Tensor:
    return 0.1 + torch.rand(layers, heads, generator=torch.Generator().manual_seed(seed))


def filled(recipe: str, cuts: list[int], scores: torch.Tensor, layer: int = 1, heads: HeadShard | None = None, B=1):
    """Return a store that was fed random tokens in calls that end at `cuts`, and these tokens."""
    keys, values = (x[:, :, : cuts[-1]] for x in tokens(1000, B=B, D=32))
    query = torch.randn(B, 4, 1000, 32, generator=torch.Generator().manual_seed(1))[:, :, : cuts[-1]]
    plan = Recipe.parse(recipe).plan(layer, len(scores))._replace(scores=scores)
    if heads is not None:
        own = slice(heads.first, heads.first + heads.count)
        keys, values, query = keys[:, own], values[:, own], query.unflatten(1, (2, 2))[:, own].flatten(1, 2)
    store, start = LayerStore(plan, keys, values, heads=heads), 0
    for stop in cuts:
        feed(store, *(x[:, :, start:stop] for x in (keys, values, query)))
        start = stop
    return store, keys, query


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize("beta", [1.0, 1.005, 1.2, 2.0, 10.0])
def test_budgets_are_those_of_the_paper(beta):
    """b·(1 − 1/β) + S·N·b/β beyond the window, where no head reaches the prompt's length."""
    scores, window, base = uneven(30, 8), 8, 256
    got = HeadKV(budget=base, sinks=0, beta=beta).of_heads(base, 10**6, scores)
    b = base - window
    expected = window + b * (1 - 1 / beta) + (scores / scores.sum()).double() * (b / beta * 30 * 8)
    assert got.sum() == base * 30 * 8
    assert (got - expected).abs().max() < 1
    assert (got.flatten()[scores.flatten().argsort()].diff() >= 0).all()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=4, max_size=40),
    st.integers(1, 300),
    st.integers(1, 600),
    st.floats(1, 20),
    st.integers(0, 3),
)
def test_budgets_add_up_and_respect_their_limits(values, mean, most, beta, left_out):
    scores = torch.tensor(values)
    scores[:left_out] = -1
    scores = scores[:, None]
    always = min(mean, 12)
    got = head_budgets(scores, mean, always, most, beta)[left_out:]
    assert (head_budgets(scores, mean, always, most, beta)[:left_out] == mean).all()
    if mean >= most:
        assert (got == mean).all()
        return
    assert got.sum() == mean * len(got)
    assert int(got.max()) <= most
    assert int(got.min()) >= always


def test_what_a_full_head_cannot_use_goes_to_the_others():
    scores = torch.tensor([[100.0, 1.0], [1.0, 2.0]])
    got = head_budgets(scores, 50, 10, 80, 1.0)
    assert int(got.sum()) == 4 * 50
    rest = torch.tensor([1.0, 1.0, 2.0])
    expected = 10 + rest / 4 * (4 * 40 - 70)
    assert got[0, 0] == 80
    assert (got.flatten()[1:] - expected).abs().max() <= 1
    assert head_budgets(torch.zeros(2, 2), 50, 10, 80, 1.0).tolist() == [[50, 50], [50, 50]]


def test_wrong_options():
    for beta in ("0.5", "0"):
        with pytest.raises(UserError, match=f"beta={beta} is not allowed; give 1"):
            Recipe.parse(f"headkv:beta={beta}+kivi")


# ---------------------------------------------------------------- kept tokens


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_heads_keep_their_own_number_of_tokens(pool):
    """SnapKV's choice in each head, with the head's capacity (`ReasonSnapKVCluster` of the authors)."""
    scores = uneven()
    store, keys, query = filled(f"headkv:budget=80,sinks=0,pool={pool}+{EXACT}", [300], scores)
    window = query[:, :, -8:].unflatten(1, (2, 2))
    weights = window @ keys.unsqueeze(2).transpose(-1, -2) * 0.125
    weights = weights.masked_fill(torch.ones(8, 300, dtype=torch.bool).triu(300 - 8 + 1), -torch.inf)
    votes = weights.softmax(-1)[..., :-8].sum(-2).mean(2)
    pooling = torch.nn.functional.avg_pool1d if pool == "avg" else torch.nn.functional.max_pool1d
    order = pooling(votes, 7, stride=1, padding=3).argsort(dim=-1, descending=True, stable=True)
    capacity = HeadKV(budget=80, sinks=0).of_heads(80, 300, scores)[1]
    assert capacity[0] != capacity[1]
    for head in range(2):
        chosen = order[0, head, : capacity[head] - 8].tolist()
        assert kept(store, 0, head) == sorted([*chosen, *range(292, 300)])


def test_layers_together_keep_the_budget():
    scores = uneven(6)
    stores = [filled("headkv:budget=0.3+kivi:bits=4", [400], scores, layer)[0] for layer in range(6)]
    total = sum(len(kept(store, 0, head)) for store in stores for head in range(2))
    assert total == 12 * 120
    assert all(torch.isfinite(attend_store(s, AttentionCall(torch.ones(1, 4, 1, 32), None, 0.1))).all() for s in stores)


def test_a_later_prompt_selects_again_and_generated_tokens_stay():
    scores = uneven()
    store, *_ = filled(f"headkv:budget=100+{EXACT}", [300], scores)
    first = [kept(store, 0, head) for head in range(2)]
    store, *_ = filled(f"headkv:budget=100+{EXACT}", [300, *range(301, 361)], scores)
    assert [kept(store, 0, head) for head in range(2)] == [[*one, *range(300, 360)] for one in first]
    store, *_ = filled(f"headkv:budget=100+{EXACT}", [300, *range(301, 361), 460], scores)
    assert [len(kept(store, 0, head)) for head in range(2)] == HeadKV(budget=100).of_heads(100, 460, scores)[1].tolist()


@pytest.mark.parametrize(
    ("budget", "prompt"), [(1.2, 50), (3, 50), (20, 50), (64, 1), (64, 2), (1000, 50), (0.001, 50)]
)
@pytest.mark.parametrize("recent", [0, 8, 40])
def test_odd_budgets(budget, prompt, recent):
    """One token, fewer than the sinks, fewer than the window, more than the prompt, prompts of one token."""
    recipe = f"headkv:budget={budget},recent={recent}+kivi:bits=4"
    stores = [filled(recipe, [prompt, *range(prompt + 1, prompt + 8)], uneven(3), layer)[0] for layer in range(3)]
    held = [kept(store, 0, head) for store in stores for head in range(2)]
    mean = min(prompt, max(1, int(budget)))
    assert sum(map(len, held)) == 6 * (mean + 7)
    assert all(one[-7:] == list(range(prompt, prompt + 7)) for one in held)
    out = attend_store(stores[0], AttentionCall(torch.ones(1, 4, 1, 32), None, 0.125))
    assert torch.isfinite(out).all()


def test_a_share_of_the_heads_keeps_what_the_whole_layer_keeps():
    scores = uneven()
    whole, *_ = filled("headkv:budget=100+kivi:bits=4", [300], scores, B=2)
    for head in range(2):
        own = HeadShard(head, 1, 2, lambda x: x)
        part, *_ = filled("headkv:budget=100+kivi:bits=4", [300], scores, heads=own, B=2)
        assert [kept(part, row, 0) for row in range(2)] == [kept(whole, row, head) for row in range(2)]


def test_a_store_without_importance():
    keys, values = tokens(100)
    store = LayerStore(Recipe.parse("headkv+kivi").plan(0, 1), keys, values)
    with pytest.raises(UserError, match="needs the importance of the model's heads: measure it with `tersekv cal"):
        feed(store, keys, values, torch.randn(1, 4, 100, 64))


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("recipe", ["headkv:budget=0.3+kivi:bits=4", "headkv:budget=150,sinks=0+qjl", "headkv+exact"])
@pytest.mark.parametrize("generated", [0, 70])
def test_estimate_with_importance_is_what_a_layer_holds(recipe, generated):
    """Each head holds the blocks of its own tokens, and no others."""
    scores = uneven(3)
    stores = [filled(recipe, [500, *range(501, 501 + generated)], scores, layer)[0] for layer in range(3)]
    shape = CacheShape((None,) * 3, 2, 32, 32, torch.float32)
    expected = predict(shape, recipe, 500 + generated, generated=generated, scores=scores).parts
    for part in set(expected) - {"tables"}:
        assert expected[part] == sum(store.footprint().parts[part] for store in stores), part
    equal = predict(shape, recipe, 500 + generated, generated=generated).parts
    assert abs(sum(expected.values()) - sum(equal.values())) < 6 * 2 * 32 * 32 * 2  # 32 exact tokens of six heads


def test_footprint_counts_the_tensors_held():
    store, *_ = filled("headkv:budget=100+kivi:bits=4", [300, *range(301, 371)], uneven(), B=2)
    planes = [x for side in store.sides for page in side.packed.pages for x in page.planes.values()]
    held = [
        *planes,
        *(held.slots.held["positions"] for held in store.chosen[0].slots),
        *store.recent.buffers,
        *store.chosen[0].loose[0].data,
    ]
    assert store.footprint().total_bytes == sum(x.numel() * x.element_size() for x in held)


# ---------------------------------------------------------------- importance of heads


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss"])
def test_importance_is_that_of_full_attention_matrices(models, name):
    model, ids, source, n = models[name], prompt(120)[0], [20, 21, 22, 40], 5
    got = measure(model, [AnsweredPrompt(ids, source, n)])
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids[None], output_attentions=True).attentions
    model.set_attn_implementation(before)
    kinds = getattr(model.config, "layer_types", ["full_attention"] * len(weights))
    for layer, (kind, matrix) in enumerate(zip(kinds, weights, strict=True)):
        expected = torch.zeros(matrix.shape[1])
        for head in range(matrix.shape[1]):
            for query in range(120 - n - 1, 120 - 1):
                values, at = matrix[0, head, query].topk(len(source))
                expected[head] += sum(v for v, i in zip(values, at, strict=True) if int(i) in source) / (
                    len(source) * n
                )
        if kind == "full_attention":
            torch.testing.assert_close(got[layer], expected.unflatten(0, (2, -1)).mean(1), atol=1e-6, rtol=1e-4)
        else:
            assert (got[layer] == -1).all()
    assert (got >= 0).any()
    twice = measure(model, [AnsweredPrompt(ids, source, n)] * 2)
    torch.testing.assert_close(twice, got)


# ---------------------------------------------------------------- files


def calibration_of(model, scores: torch.Tensor, policy: str = "headkv") -> Calibration:
    made = Made(policy, architecture(model.config), fingerprint(model), "text", "0" * 64, 1, 64, 0, 0)
    return Calibration(made, {SCORES: scores})


def test_a_recipe_finds_its_importance(llama, empty_cache, tmp_path):
    recipe, scores = "headkv:budget=0.4+kivi:bits=4", uneven(3)
    for call in (lambda: tersekv.compress(llama, recipe), lambda: tersekv.CompressedCache(llama, recipe)):
        with pytest.raises(UserError, match=r"needs a calibration.* `tersekv calibrate --model MODEL --recipe 'headkv"):
            call()
    path = profile_place(default_folder(fingerprint(llama)), "headkv")
    calibration_of(llama, scores).save(path)
    for one in (None, path, path.parent, Calibration.load(path)):
        with tersekv.compress(llama, recipe, one), torch.no_grad():
            store = llama(prompt(300)).past_key_values.layers[2].store
        assert [len(kept(store, 0, h)) for h in range(2)] == HeadKV().of_heads(120, 300, scores)[2].tolist()
    assert calibration_for(llama, recipe).about()["recipe"] == "headkv"
    both = "headkv+kvquant:bits=4"
    with pytest.raises(UserError, match=r"two calibrations, and .* is one file; give the folder of both"):
        tersekv.compress(llama, both, path)
    with pytest.raises(UserError, match=r"needs a calibration, and .*kvquant.* does not exist"):
        tersekv.compress(llama, both)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (torch.zeros(3, 4), r"scores is float32 \[3, 4\], and must be float32 \[3, 2\]; calibrate again"),
        (torch.full((3, 2), torch.nan), "scores .*; calibrate again"),
        (torch.full((3, 2), -2.0), "scores .*; calibrate again"),
    ],
)
def test_faults_of_a_file(llama, empty_cache, tmp_path, scores, words):
    calibration_of(llama, scores).save(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=words):
        tersekv.compress(llama, "headkv+kivi", tmp_path / "a.safetensors")


def test_importance_of_another_model_or_policy(llama, models, empty_cache):
    with pytest.raises(UserError, match="model of another architecture"):
        tersekv.compress(llama, "headkv+kivi", calibration_of(models["qwen3"], uneven(3)))
    with pytest.raises(UserError, match="was made for recipe 'other', not for 'headkv'"):
        tersekv.compress(llama, "headkv+kivi", calibration_of(llama, uneven(3), "other"))
    changed = MODELS["llama"]().eval()
    with pytest.raises(UserError, match="model with other weights"):
        tersekv.compress(llama, "headkv+kivi", calibration_of(changed, uneven(3)))


def test_a_saved_cache_holds_the_importance(llama, empty_cache, tmp_path):
    recipe, found = "headkv:budget=0.4+kivi:bits=4", calibration_of(llama, uneven(3))
    with tersekv.compress(llama, recipe, found):
        cache = tersekv.CompressedCache(llama, recipe, found)
        read(llama, cache, [prompt(300)])
        goes_on_alike(llama, cache, tmp_path / "cache.safetensors", [*singles(3), prompt(90, seed=2)])
        cache.save(tmp_path / "again.safetensors")
    held = load_file(tmp_path / "again.safetensors")
    assert torch.equal(held["layers.0.plan.scores"], uneven(3))
    empty = tersekv.CompressedCache(llama, recipe, found)
    assert empty.empty(llama.config).layers[0].plan.scores is not None


def test_the_command(tiny, capfd, empty_cache, tmp_path):
    """One measurement serves every recipe of the policy. Codecs are calibrated by the same command."""
    sizes = ("--samples", "2", "--length", "1200", "--workers", "1")
    text = tmp_path / "text"
    text.write_text("".join(f"Line {i} of a text. " for i in range(400)))
    common = ("-m", tiny, "-t", str(text), *sizes)
    made = run_json(capfd, "calibrate", *common, "-r", "headkv+kivi:bits=4", "-r", "headkv:beta=2+kvquant:bits=2")
    assert [file["recipe"] for file in made["files"]] == ["headkv", "headkv:beta=2+kvquant:bits=2"]
    path = Path(made["files"][0]["path"])
    assert path.parent.parent == empty_cache / "calibrations"
    found = Calibration.load(path)
    assert (found.made.recipe, found.made.samples, found.made.length) == ("headkv", 2, 1200)
    assert found.tensors[SCORES].shape == (2, 1)
    assert (found.tensors[SCORES] >= 0).all()
    for recipe in ("headkv:budget=0.3+kivi:bits=4", "headkv:beta=2,budget=0.5+kvquant:bits=2"):
        held = run_json(capfd, "generate", "-m", tiny, "-r", recipe, "-p", "x" * 300, "--max-new-tokens", "3")["cache"]
        assert held["bytes_by_part"]["selection"] > 0
    out = ("-o", str(tmp_path / "heads.safetensors"))
    again = run_json(capfd, "calibrate", *common, "-r", "headkv+exact", *out)
    assert again["files"][0]["digest"] == made["files"][0]["digest"]
    assert cli.run(["calibrate", *common, "-r", "headkv+kvquant:bits=2", *out]) == 2
    assert "give a folder" in capfd.readouterr().err
