"""All reasons against a recipe are given at once."""

from __future__ import annotations

import pytest
import transformers as tf

import tersekv
from conftest import SHAPE
from tersekv.cli.doctor import describe
from tersekv.errors import UserError
from tersekv.hf.why_not import why_not
from tersekv.recipe import PRESETS


def test_all_reasons_at_once(models):
    config = models["deepseek_v3"].config
    recipe = "snapkv+kivi"
    found = why_not(recipe, config, "context_parallel")
    for part in ("the policy must keep every token", "drops tokens", "the model has latent attention"):
        assert sum(part in reason for reason in found) == 1
    with pytest.raises(UserError) as error:
        tersekv.CompressedCache(config, "snapkv+kivi")
    assert "snapkv+kivi on deepseek_v3: " in str(error.value)
    assert why_not("kivi", config) == why_not("snapkv+kivi", models["llama"].config) == []


@pytest.mark.parametrize(
    "recipe",
    [
        *PRESETS, "snapkv+safe;0=exact", "kivi:group=16,centre=true,calibration=prompt", "kvquant:calibration=prompt",
        "kivi:group=16,pre_rope=true/uniform:group=16", "trellis:bits=3,calibration=prompt,pre_rope=true",
    ],
)  # fmt: skip
def test_keys_that_must_keep_their_rope(recipe):
    """The refusal names a recipe that works, as a preset takes no options."""
    config = tf.LlamaConfig(**SHAPE)
    config.rope_parameters = {"rope_type": "none such"}
    (reason,) = why_not(recipe, config)
    other = tersekv.Recipe.parse(reason.split("; write ")[1])
    assert why_not(other, config) == []
    assert other.tokens == tersekv.Recipe.parse(recipe).tokens
    assert "pre_rope=false" in str(other)


def test_an_unknown_use(llama):
    with pytest.raises(UserError, match="use='vllm' is not allowed; choose one of transformers, context_parallel"):
        why_not("kivi", llama.config, "vllm")


def test_doctor_gives_the_reasons(models, tmp_path):
    models["deepseek_v3"].config.save_pretrained(tmp_path)
    good, one, other = describe(str(tmp_path), ["kivi", "mixed+kivi:bits=4", "kivi;9=exact"])["recipes"]
    assert "reasons" in good
    assert not one["good"]
    assert any("the policy must keep every token at one rate" in reason for reason in one["reasons"])
    assert other["reasons"] == ["layers '9' do not exist; the model has layers 0 to 2"]
