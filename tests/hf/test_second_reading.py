"""Ranking the tokens of a prompt by a second reading: `mixed:reread=true`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf

import tersekv
from conftest import SHAPE, build, prompt
from tersekv.cache.ranked_tokens import RankedTokens
from tersekv.cache.segments import Observed
from tersekv.calibration.attention_spread import measure
from tersekv.hf.second_reading import FEWEST
from test_transformers import GREEDY

RECIPE = "mixed:recent=20,reread=true,exact=fp32+uniform:bits=8"
PLAIN = RECIPE.replace(",reread=true", "")


@pytest.fixture
def ranked(monkeypatch) -> list[torch.Tensor]:
    """Importance of the tokens that layers rank, in the order of their calls."""
    found: list[torch.Tensor] = []
    choice = RankedTokens.choose

    def noted(ranks: RankedTokens, observed: Observed, n: int, place: int, sinks: int, hidden: Any) -> torch.Tensor:
        if observed.importance is not None:
            found.append(observed.importance[:, :, sinks : sinks + n])
        return choice(ranks, observed, n, place, sinks, hidden)

    monkeypatch.setattr(RankedTokens, "choose", noted)
    monkeypatch.setattr("tersekv.hf.waiting.MOST_WAITING", 0)  # each layer alone
    return found


def weights_of_second_reading(model: tf.PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the importance of each token and layer, from transformers' own attention weights."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    weights = model(torch.cat([ids, ids], dim=1), output_attentions=True).attentions
    model.set_attn_implementation(before)
    n, heads = ids.shape[1], model.config.num_key_value_heads
    return [layer[:, :, n:, :n].unflatten(1, (heads, -1)).square().sum((2, 3)).sqrt() for layer in weights]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gemma3"])
def test_importance_is_the_attention_of_the_second_reading(models, name, ranked):
    model, ids = models[name], prompt(300)
    expected = weights_of_second_reading(model, ids)
    with tersekv.compress(model, RECIPE), torch.no_grad():
        cache = tersekv.CompressedCache(model, RECIPE)
        logits = model(ids, past_key_values=cache).logits
    full = [i for i, layer in enumerate(cache.layers) if layer.sliding_window is None]
    assert cache.get_seq_length() == 300
    assert len(ranked) == len(full)
    for i, importance in zip(full, ranked, strict=True):
        packed = cache.layers[i].store.packed_tokens
        torch.testing.assert_close(importance, expected[i][:, :, 4 : 4 + packed], atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-5, rtol=1e-4)


def test_rows_with_padding_are_ranked_as_alone(models, ranked):
    model, ids = models["llama"], prompt(340, batch=2)
    mask = torch.ones(2, 340, dtype=torch.long)
    mask[0, :40] = 0
    with tersekv.compress(model, RECIPE), torch.no_grad():
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        model(ids * mask, attention_mask=mask, position_ids=places)
        both = list(ranked)
        ranked.clear()
        model(ids[:1, 40:])
    for together, alone in zip(both, ranked, strict=True):
        shared = together[:1, :, 40:]
        torch.testing.assert_close(shared, alone[:, :, : shared.shape[2]], atol=1e-5, rtol=1e-3)
        assert float(together[0, :, :36].abs().max()) == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"prefill_chunk_size": 300}, {"prompt_lookup_num_tokens": 5}],
    ids=["greedy", "beam", "chunked", "assisted"],
)
@pytest.mark.filterwarnings("ignore")
def test_generated_tokens(models, name, options):
    model, ids = models[name], prompt(120).repeat(1, 5)
    kwargs = GREEDY | options | {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20}
    recipe = RECIPE.replace("reread", "rest=7,reread")
    expected = model.generate(ids, **kwargs)
    with tersekv.compress(model, recipe):
        got = model.generate(ids, **kwargs)
    assert got.tolist() == expected.tolist()


def length_read(model: tf.PreTrainedModel, recipe: str, *args: torch.Tensor, **kwargs: torch.Tensor) -> list[int]:
    """Return the number of tokens of each call of the first layer."""
    lengths: list[int] = []
    layer = model.get_decoder().layers[0]
    handle = layer.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    try:
        with tersekv.compress(model, recipe), torch.no_grad():
            output = model(*args, **kwargs)
        assert output[0].shape[1] in lengths or 2 * output[0].shape[1] in lengths
    finally:
        handle.remove()
    return lengths


def test_what_is_read_twice(llama):
    ids = prompt(FEWEST)
    embeds = llama.get_input_embeddings()(ids)
    assert length_read(llama, RECIPE, ids) == [2 * FEWEST]
    assert length_read(llama, RECIPE, inputs_embeds=embeds) == [2 * FEWEST]
    assert length_read(llama, RECIPE, ids, torch.ones_like(ids)) == [2 * FEWEST]
    assert length_read(llama, RECIPE, ids, return_dict=False) == [2 * FEWEST]
    assert length_read(llama, RECIPE, prompt(FEWEST - 1)) == [FEWEST - 1]
    assert length_read(llama, PLAIN, ids) == [FEWEST]
    assert length_read(llama, RECIPE, ids, output_hidden_states=True) == [FEWEST]


def test_no_place_for_a_second_reading():
    """Beyond the positions that the model knows, tokens are ranked by moved queries."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(**SHAPE | {"max_position_embeddings": 600}, head_dim=32)
    model = tf.LlamaForCausalLM(config).eval()
    assert length_read(model, RECIPE, prompt(301)) == [301]
    assert length_read(model, RECIPE, prompt(300)) == [600]


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 512, "factor": 8.0,
}  # fmt: skip


def test_rope_that_depends_on_the_length():
    """Twice the tokens would turn the first reading by the angles of a longer text."""
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE, head_dim=32, rope_parameters=LONGROPE)).eval()
    ids = prompt(FEWEST + 1)
    assert length_read(model, RECIPE, ids) == [FEWEST + 1]
    with tersekv.compress(model, RECIPE), torch.no_grad():
        logits = model(ids).logits
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(measure(model, prompt(300), True), measure(model, prompt(300), False))


@pytest.mark.parametrize("asked", ["hidden_states", "router_logits"])
@pytest.mark.parametrize("by_config", [False, True])
def test_results_of_all_tokens_are_those_of_one_reading(asked, by_config):
    """Hidden states, and the router's logits with the loss that is computed from them."""
    torch.manual_seed(0)
    config = tf.MixtralConfig(**SHAPE, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
    model, ids = tf.MixtralForCausalLM(config).eval(), prompt(300)
    options = {"labels": ids, "attention_mask": torch.ones_like(ids)}
    if by_config:
        setattr(model.config, f"output_{asked}", True)
    else:
        options[f"output_{asked}"] = True
    with torch.no_grad():
        wanted = model(ids, **options)
        with tersekv.compress(model, RECIPE):
            got = model(ids, **options)
    torch.testing.assert_close(got[asked], wanted[asked], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.loss, wanted.loss)
    assert torch.equal(got.aux_loss, wanted.aux_loss) if asked == "router_logits" else got.aux_loss is None


def test_an_interrupted_prompt_can_be_read_again(llama):
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    ids = prompt(300)
    with tersekv.compress(llama, RECIPE), torch.no_grad():
        cache = tersekv.CompressedCache(llama, RECIPE)
        handle = llama.model.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            llama(ids, past_key_values=cache)
        handle.remove()
        cache.reset()
        short = llama(ids[:, :60], past_key_values=cache)
        assert short.logits.shape[1] == cache.get_seq_length() == 60


def test_the_model_is_restored(llama):
    before = dict(llama.model._forward_pre_hooks), dict(llama.model._forward_hooks)
    with tersekv.compress(llama, RECIPE):
        copies = copy.deepcopy(llama), copy.deepcopy(llama.model)
    assert before == (dict(llama.model._forward_pre_hooks), dict(llama.model._forward_hooks))
    assert not copies[0].model._forward_hooks
    assert not copies[1]._forward_hooks


def test_models_without_a_decoder_of_their_own_kind():
    """Position tables of a fixed length allow no second reading beyond them, and queries are ranked."""
    torch.manual_seed(0)
    model = tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=97, n_embd=64, n_layer=2, n_head=2, n_positions=400)).eval()
    with tersekv.compress(model, RECIPE), torch.no_grad():
        cache = tersekv.CompressedCache(model, RECIPE)
        logits = model(prompt(300), past_key_values=cache).logits
    torch.testing.assert_close(logits, model(prompt(300)).logits, atol=1e-5, rtol=1e-4)


def test_gradients_and_copies_of_a_cache(llama):
    model = build("llama")
    embeds = model.get_input_embeddings()(prompt(300)).requires_grad_(True)
    with tersekv.compress(model, RECIPE):
        cache = tersekv.CompressedCache(model, RECIPE)
        logits = model(inputs_embeds=embeds, past_key_values=cache).logits
        logits.sum().backward()
        twin = copy.deepcopy(cache)
        with torch.no_grad():
            a, b = (model(prompt(1), past_key_values=c).logits for c in (cache, twin))
    assert torch.equal(a, b)
    assert torch.isfinite(embeds.grad).all()
