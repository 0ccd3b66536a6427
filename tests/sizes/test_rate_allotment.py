"""Rates of each head under `mixed` with `allot=model`: the measurement, the choice, and caches that use it."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tersekv
from conftest import prompt
from tersekv import cli
from tersekv.attention.spread import in_order
from tersekv.cache.footprint import Footprint
from tersekv.cache.layer import LayerStore
from tersekv.cache.segments import STEPS, Observed
from tersekv.calibration import first_use
from tersekv.calibration.attention_spread import SINKS, measure
from tersekv.calibration.calibration import SCORES, Calibration, Made
from tersekv.calibration.find import calibrated_plans, default_folder, profile_place
from tersekv.calibration.needs import attention_plans
from tersekv.codecs import Codec
from tersekv.codecs.codebooks.bits import SQUARED_ERROR
from tersekv.errors import UserError
from tersekv.models.config import cache_shape
from tersekv.models.fingerprint import architecture, fingerprint
from tersekv.recipe import PRESETS, Recipe
from tersekv.sizes import rate_allotment
from tersekv.sizes.cache_size import CacheShape
from tersekv.sizes.estimate import predict
from tersekv.sizes.rate_allotment import MOST_ON_PROMPT, allotted
from tersekv.transforms.rope import standard_rope
from test_cli import run_json
from test_saved import goes_on_alike, read, singles

RECIPE = "mixed:allot=model,recent=20+trellis:bits=2,calibration=prompt"


pytestmark = pytest.mark.usefixtures("empty_cache")


def spread(*shares: float, second: float = 0.5) -> torch.Tensor:
    """Return curves of two heads of layers.

    The most important eighth of the first head's tokens gets this share of all squared attention; that of the second
    one gets this share times `second`.
    """
    at = torch.arange(STEPS + 1) / STEPS
    own = [[torch.where(at < 1 / 8, 8 * at * s, s + (1 - s) * (at - 1 / 8) * 8 / 7) for s in (t, t * second)]
           for t in shares]  # fmt: skip
    return torch.stack([torch.stack(heads) for heads in own]).float()


def calibration_of(model, scores: torch.Tensor, profile: str = "mixed") -> Calibration:
    made = Made(profile, architecture(model.config), fingerprint(model), "text", "0" * 64, 1, 512, 0, SINKS)
    return Calibration(made, {SCORES: scores})


def chosen(model, recipe: str, scores: torch.Tensor):
    parsed = Recipe.parse(recipe)
    return allotted(attention_plans(parsed, model.config), scores, (32, 32))


def loss_and_bytes(plans, scores: torch.Tensor, shape) -> tuple[float, float]:
    """Return the loss of all heads and the mean bytes of a token's codes and scales."""
    loss, size = 0.0, []
    for i, h in itertools.product(plans, range(2)):
        plan, curve, own = plans[i], scores[i, h].double(), plans[i].rates[h]
        bits, rest, share = own.tolist()
        first = float(curve[round(share * STEPS)])
        loss += first * Codec.expected_error(bits) + (float(curve[-1]) - first) * Codec.expected_error(rest)
        at = (share, bits), (1 - share, rest)
        size.append(
            sum(
                part * codec.at_rate(bits).layout(dim).block_bytes() / 32
                for part, bits in at
                for codec, dim in ((plan.keys, shape.key_dim), (plan.values, shape.value_dim))
            )
        )
    return loss, sum(size) / len(size)


def test_squared_errors_lie_between_those_of_whole_bits():
    table = SQUARED_ERROR["trellis"]
    assert Codec.expected_error(2) == pytest.approx(float(table[2]))
    assert table[3] < Codec.expected_error(2.5) < table[2]
    assert Codec.expected_error(2.5) == pytest.approx(float(table[2] * table[3]) ** 0.5)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [(codec, bits) for codec in ("trellis:calibration=prompt", "kivi", "uniform", "turboquant") for bits in (2, 3)]
    + [("trellis:calibration=prompt", 1.5)],
)
def test_layers_share_the_bits_of_the_recipe(llama, codec, bits):
    """Bytes are those of equal rates or a little less, and the loss is lower."""
    recipe = f"mixed:allot=model+{codec}{',' if ':' in codec else ':'}bits={bits}"
    scores, shape = spread(0.99, 0.5, 0.2), cache_shape(llama.config)
    plans = chosen(llama, recipe, scores)
    loss, size = loss_and_bytes(plans, scores, shape)
    equal = attention_plans(Recipe.parse(recipe), llama.config)[0]
    layouts = [equal.keys.layout(shape.key_dim), equal.values.layout(shape.value_dim)]
    whole = sum(layout.block_bytes() / 32 for layout in layouts)
    assert 0.9 * whole < size <= whole + 1e-6
    assert loss < float(scores[:, :, -1].sum()) * Codec.expected_error(bits)
    for plan in plans.values():
        assert (plan.rates[:, 1] < plan.rates[:, 0]).all()
        assert plan.keys.bits == plan.values.bits == plan.rates[:, 0].max()


def test_no_other_choice_of_a_head_is_better_at_its_price(llama):
    """Among all choices the heads' mean bytes and loss lie on the lower hull: no swap of two heads' choices helps."""
    scores = spread(0.99, 0.5, 0.2) * torch.tensor([1.0, 3.0, 0.5])[:, None, None]
    shape = cache_shape(llama.config)
    plans = chosen(llama, RECIPE, scores)
    loss, size = loss_and_bytes(plans, scores, shape)
    rates = torch.stack([plan.rates for plan in plans.values()]).flatten(0, 1)
    assert len(rates.unique(dim=0)) > 3
    for i in range(len(rates)):
        for j in range(len(rates)):
            order = torch.arange(len(rates)).index_copy(0, torch.tensor([i, j]), torch.tensor([j, i]))
            swapped = rates[order].unflatten(0, (3, 2))
            held = {k: plan._replace(rates=swapped[k]) for k, plan in plans.items()}
            other, bytes_ = loss_and_bytes(held, scores, shape)
            assert bytes_ == pytest.approx(size)
            assert other >= loss - 1e-9


def test_heads_whose_attention_is_found_get_fewer_bits(llama):
    plans = chosen(llama, RECIPE, spread(0.999, 0.5, 0.13, second=1.0))
    mean = [[share * bits + (1 - share) * rest for bits, rest, share in p.rates.tolist()] for p in plans.values()]
    assert mean[0][0] < mean[1][0] < mean[2][0]
    assert all(first == other for first, other in mean)


def test_a_head_that_reads_most_of_the_prompt_codes_the_others_well(llama):
    """A fact that nothing has asked for yet is among the few tokens that such a head did not read."""
    at = torch.arange(STEPS + 1) / STEPS
    scores = spread(0.99, 0.95, 0.9)
    scores[1, 0] = 5 * (at * 1.1).clamp(max=1)
    bits, rest, share = chosen(llama, RECIPE.replace("model", "prompt"), scores)[1].rates[0].tolist()
    assert share <= MOST_ON_PROMPT
    assert bits - rest <= 1


def has_rates(store, rates: torch.Tensor) -> None:
    """Check that each head of a store has packed its share of the tokens at each of its rates."""
    bits = [tier.keys.codec.bits for tier in store.tiers]
    for h, (high, rest, share) in enumerate(rates.tolist()):
        held = {of: int(tier.blocks[0, h]) * 32 for of, tier in zip(bits, store.tiers, strict=True)}
        assert sum(held.values()) == held[high] + held[rest] == store.packed_tokens
        assert abs(held[high] - share * store.packed_tokens) <= 32


def test_exact_layers_and_layers_without_a_measurement_keep_their_plan(llama):
    scores = spread(0.9, 0.5, 0.2)
    scores[1] = -1
    plans = chosen(llama, f"{RECIPE};0=exact", scores)
    assert [plan.rates is not None for plan in plans.values()] == [False, False, True]
    assert plans[1].keys.bits == 2


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("mixed:allot=model,budget=0.3+trellis:bits=2", "allot=model chooses budget and rest"),
        ("mixed:allot=prompt,rest=1+trellis:bits=2", "allot=prompt chooses .* leave these options out"),
        ("mixed:allot=both+trellis:bits=2", "allot=both is not allowed; choose one of layer, prompt, model"),
        ("mixed:allot=model+qjl", "allot=model is not available: .* use trellis, uniform, kivi or"),
        ("mixed:allot=prompt+qjl", "allot=prompt is not available: .* use trellis, uniform, kivi or"),
    ],
)
def test_wrong_options(recipe, message):
    with pytest.raises(UserError, match=message):
        Recipe.parse(recipe)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("mixed:allot=model+trellis:bits=2/trellis:bits=3", "the same bits for keys and values .* got 2, 3"),
        ("mixed:allot=model+trellis:bits=8", "rates above and below the recipe's bits=8, and this codec has 0.5, .* 8"),
        ("mixed:allot=model+trellis:bits=0.25", "rates above and below"),
        ("mixed:allot=model+trellis:bits=2;1=trellis:bits=3", "in all layers .* got 2, 3"),
    ],
)
def test_recipes_that_leave_no_choice(llama, recipe, message):
    with pytest.raises(UserError, match=message):
        chosen(llama, recipe, spread(0.9, 0.5, 0.2))


def test_attention_is_summed_in_order_of_rank():
    received = torch.arange(2 * 64.0).view(2, 64)
    rank = torch.arange(2 * 64.0).view(2, 64)
    sums = in_order(received, rank)
    assert sums.shape == (2, STEPS + 1)
    assert sums[:, 0].eq(0).all()
    assert torch.equal(sums[:, -1], received.sum(1))
    assert torch.equal(sums[:, 1], received[:, -2:].sum(1))
    assert torch.equal(in_order(received, -rank)[:, 1], received[:, :2].sum(1))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("reread", [False, True])
def test_the_measurement_sums_the_squares_of_full_attention(models, name, reread):
    model, ids = models[name], prompt(160, batch=2)
    got = measure(model, ids, reread)
    first, kept = 120, model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model(ids, output_attentions=True).attentions
    finally:
        model.set_attn_implementation(kept)
    heads = got.shape[1]
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(weights)
    assert (got[[kind != "full_attention" for kind in kinds]] == -1).all()
    for layer, kind in enumerate(kinds):
        if kind != "full_attention":
            continue
        later = weights[layer][:, :, first:, SINKS:first].float().square().sum(-1).mean((0, 2))
        torch.testing.assert_close(got[layer, :, -1], later.view(heads, -1).mean(1), rtol=1e-3, atol=1e-6)
        assert (got[layer].diff(dim=-1) >= 0).all()
        assert (got[layer, :, STEPS // 2] >= got[layer, :, -1] / 4).all()  # the ranking finds some of it


def test_short_texts_are_refused(llama):
    with pytest.raises(UserError, match="texts of 48 tokens or more, got 40"):
        measure(llama, prompt(40), False)


def test_the_first_use_measures_the_model(llama):
    path = profile_place(default_folder(fingerprint(llama)), "mixed")
    with pytest.warns(UserWarning, match="no calibration for 'mixed:allot=model.* it is made once"):
        cache = tersekv.CompressedCache(llama, RECIPE)
    assert Calibration.load(path).made.corpus == "own text"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tersekv.CompressedCache(llama, RECIPE.replace("bits=2", "bits=3"))  # one measurement serves all rates
    assert len({tuple(rates) for layer in cache.layers for rates in layer.plan.rates.tolist()}) > 1
    with pytest.raises(UserError, match="needs a calibration: give the model in place of its config"):
        tersekv.CompressedCache(llama.config, RECIPE)
    with pytest.raises(UserError, match="was made for recipe 'mixed', not for 'mixed-reread'"):
        tersekv.CompressedCache(llama, RECIPE.replace("allot=model", "allot=model,reread=true"), path)


@pytest.mark.parametrize("words", [259, 80])
def test_the_first_use_reads_a_text_with_the_tokenizer_of_the_model(tiny, words):
    """A tokenizer whose ids the model does not have is not used."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.resize_token_embeddings(words)
    with pytest.warns(UserWarning, match="behind Python's help" if words == 259 else "writes itself"):
        tersekv.CompressedCache(model, RECIPE)
    made = Calibration.load(profile_place(default_folder(fingerprint(model)), "mixed")).made
    samples = first_use.READ if words == 259 else first_use.SAMPLES
    assert (made.corpus, made.samples) == ("pydoc" if words == 259 else "own text", samples)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "codec", ["trellis:bits=2,calibration=prompt", "kivi:bits=2", "turboquant:bits=3", "trellis:bits=2"]
)
def test_a_cache_has_the_rates_of_each_head(llama, tmp_path, codec):
    recipe = f"mixed:allot=model,recent=20,bias_correction=full+{codec}"
    found = calibration_of(llama, spread(0.99, 0.6, 0.2))
    found.save(profile_place(tmp_path, "mixed"))
    if "prompt" not in codec and "trellis" in codec:
        with tersekv.compress(llama, "trellis:bits=2"):
            folder = default_folder(fingerprint(llama))
        found.save(profile_place(folder, "mixed"))
        learnt = None
    else:
        learnt = tmp_path
    with tersekv.compress(llama, recipe, learnt):
        held = tersekv.CompressedCache(llama, recipe, learnt)
        read(llama, held, [prompt(600), *singles(5)])
        for layer in held.layers:
            store = layer.store
            assert store.ranked
            has_rates(store, layer.plan.rates)
        goes_on_alike(llama, held, tmp_path / "cache.safetensors", [*singles(3), prompt(300, seed=2)])


def test_beams_and_batches(llama):
    found = calibration_of(llama, spread(0.99, 0.6, 0.2))
    ids = prompt(300, batch=2)
    with tersekv.compress(llama, RECIPE, found):
        out = llama.generate(ids, attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=6, do_sample=False)
    assert out.shape[0] == 2


def test_estimate_is_near_what_is_held(llama, tmp_path):
    found = calibration_of(llama, spread(0.99, 0.6, 0.2))
    with tersekv.compress(llama, RECIPE, found):
        cache = tersekv.CompressedCache(llama, RECIPE, found)
        read(llama, cache, [prompt(2000)])
    predicted = predict(cache_shape(llama.config), Recipe.parse(RECIPE), 2000).total_bytes
    assert cache.footprint().total_bytes == pytest.approx(predicted, rel=0.01)


@pytest.mark.parametrize(("bits", "kind"), [(3, "Trellis"), (3.5, "Uniform"), (5, "Uniform"), (6, "Trellis")])
def test_a_short_window_gets_the_bits_that_were_asked_for(bits, kind):
    """Integers of 4 bits have no place where fewer or more were asked for."""
    plan = Recipe.parse(f"trellis:bits={bits},calibration=prompt").plan(0, 1).in_layer(4096, 128, 64, 64)
    for codec in (plan.keys, plan.values):
        assert type(codec).__name__ == kind
        assert kind == "Uniform" or codec.bits == bits


def test_layers_with_a_window_and_wide_heads_get_more_bits():
    """One rate for few tokens cannot follow the attention, and wide heads lose facts at low rates."""
    plan = Recipe.parse("small").plan(0, 2)
    sliding = plan.in_layer(4096, 4096, 64, 64)
    assert [codec.bits for codec in (sliding.keys, sliding.values)] == [4, 4]
    assert plan.in_layer(4096, 512, 256, 256).keys == Recipe.parse("default").plan(0, 2).in_layer(9, 512, 256, 256).keys
    more = Recipe.parse(PRESETS["small"].replace("1.7", "5")).plan(0, 2)
    assert more.in_layer(4096, 4096, 64, 64).keys.bits == 5
    curves = (torch.arange(STEPS + 1) / STEPS).pow(0.1).expand(2, 2, -1)

    def mean(D: int) -> float:
        rates = torch.cat(
            [one.rates for one in allotted({0: plan, 1: plan._replace(layer=1)}, curves, (D, D)).values()]
        )
        return float((rates[:, 2] * rates[:, 0] + (1 - rates[:, 2]) * rates[:, 1]).mean())

    assert 1.5 < mean(128) < 1.75
    assert 3.3 < mean(256) < 3.55


@pytest.mark.parametrize("options", ["", ",sinks=0,recent=0,bias_correction=full"])
@pytest.mark.parametrize("tokens", [200, 500, 2000])
def test_estimate_of_heads_with_many_rates(options, tokens):
    """Heads of all kinds have up to 10 rates in a layer. The estimate is not below what they hold."""
    layers, heads, D = 4, 8, 64
    recipe = Recipe.parse(f"mixed:allot=prompt{options}+trellis:bits=1.7,calibration=prompt")
    generator, rope = torch.Generator().manual_seed(0), standard_rope(D)
    power, total = (10 ** (low * torch.rand(layers, heads, 1, generator=generator)) for low in (-2, -4))
    curves = total * (torch.arange(STEPS + 1) / STEPS).pow(power)
    held, tables = [], {}
    for plan in allotted({i: recipe.plan(i, layers) for i in range(layers)}, curves, (D, D)).values():
        keys, values = torch.randn(2, 1, heads, tokens, D, generator=generator, dtype=torch.bfloat16).unbind()
        store = LayerStore(plan, keys[:, :, :0], values[:, :, :0], None, rope)
        store.keep(keys)
        store.append(keys, values, None, Observed(importance=keys[..., 0].float().square()))
        held.append(store.footprint())
        tables |= {table.data_ptr(): table for table in store.tables()}
    shape = CacheShape((None,) * layers, heads, D, D, torch.bfloat16, (rope,) * layers, heads)
    whole = Footprint.sum(held).total_bytes + sum(table.nbytes for table in tables.values())
    assert 0.995 < predict(shape, recipe, tokens).total_bytes / whole < 1.03


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (torch.zeros(3, 2), r"scores is float32 \[3, 2\], and must be float32 \[3, 2, 33\]; calibrate again"),
        (torch.full((3, 2, STEPS + 1), torch.nan), "scores .*; calibrate again"),
    ],
)
def test_faults_of_a_file(llama, tmp_path, scores, words):
    calibration_of(llama, scores).save(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=words):
        tersekv.CompressedCache(llama, RECIPE, tmp_path / "a.safetensors")


def test_plans_differ_by_layer_but_not_by_process(llama):
    """Every process of a tensor-parallel model chooses the same rates: they depend on all heads."""
    found = calibration_of(llama, spread(0.99, 0.6, 0.2))
    first, again = (calibrated_plans(Recipe.parse(RECIPE), llama.config, found) for _ in range(2))
    assert all(torch.equal(first[i].rates, again[i].rates) for i in first)
    assert first[0].policy != first[2].policy


def test_the_command(tiny, capfd, tmp_path):
    text = tmp_path / "text"
    text.write_text("".join(f"Line {i} of a text. " for i in range(400)))
    common = ("-m", tiny, "-t", str(text), "--samples", "2", "--length", "400")
    recipes = ("-r", RECIPE, "-r", RECIPE.replace("allot", "reread=true,allot"))
    made = run_json(capfd, "calibrate", *common, *recipes)
    assert [file["recipe"] for file in made["files"]] == ["mixed", "mixed-reread"]
    found = Calibration.load(Path(made["files"][0]["path"]))
    assert (found.made.samples, found.made.length, found.made.sinks) == (2, 400, SINKS)
    held = run_json(capfd, "generate", "-m", tiny, "-r", RECIPE, "-p", "x" * 600, "--max-new-tokens", "3")["cache"]
    assert held["bytes_by_part"]["selection"] > 0
    assert cli.run(["estimate", "-m", tiny, "-r", RECIPE, "-c", "4k"]) == 0
    assert "all layers count alike here" in capfd.readouterr().out


def test_an_estimate_searches_the_usual_rates_once(monkeypatch):
    """Not for each layer and length: a search takes as long as the rest of an estimate."""
    calls, search = [], rate_allotment.least_loss
    monkeypatch.setattr(rate_allotment, "least_loss", lambda *given: calls.append(given) or search(*given))
    rate_allotment._usual_rates.cache_clear()
    shape = CacheShape([None] * 4, 2, 64, 64)
    sizes = [predict(shape, Recipe.parse("small"), n).total_bytes for n in (1000, 2000)]
    assert sizes[0] < sizes[1]
    assert len(calls) == 1
