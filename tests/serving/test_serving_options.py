"""The vLLM plug-in's interpretation of a user's settings, without vLLM."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from transformers import LlamaConfig

from tersekv.errors import UserError
from tersekv.serving.vllm.options import VARIABLES, configured, note, why_not_engine, why_not_layer
from tersekv.serving.vllm.plans import pages_of

VARIABLE = VARIABLES["recipe"]


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)


def config(section) -> SimpleNamespace:
    return SimpleNamespace(additional_config={} if section is None else {"tersekv": section})


def test_the_configuration_comes_before_the_environment(monkeypatch):
    assert configured(config(None)) is None
    assert configured(None) is None
    assert str(configured(config({"recipe": "turboquant:bits=3"})).recipe) == "turboquant:bits=3"
    monkeypatch.setenv(VARIABLE, "polarquant")
    assert str(configured(config(None)).recipe) == "polarquant"
    assert str(configured(config({"recipe": "int4"})).recipe) == "int4"
    assert configured(config(None)).exact == "step"
    monkeypatch.setenv(VARIABLES["exact"], "page")
    monkeypatch.setenv(VARIABLES["calibration"], "file")
    assert configured(config(None))[1:] == ("file", "page")
    assert configured(config({"recipe": "int4"}))[1:] == (None, "step")


def test_a_recipe_of_the_environment_is_noted_in_the_configuration(monkeypatch):
    empty, full = config(None), config({"recipe": "int4"})
    note(empty)
    assert empty.additional_config == {}
    monkeypatch.setenv(VARIABLE, "polarquant")
    note(empty)
    note(full)
    assert empty.additional_config == {"tersekv": {"recipe": "polarquant"}}
    assert full.additional_config == {"tersekv": {"recipe": "int4"}}


def test_unknown_exactness():
    with pytest.raises(UserError, match="exact is 'all' and must be one of step, page"):
        configured(config({"recipe": "int4", "exact": "all"}))


@pytest.mark.parametrize("section", [{}, {"recipe": 4}, "turboquant", {"recipe": "int4", "bits": "2"}])
def test_an_invalid_section(section):
    with pytest.raises(UserError, match="is not of the form"):
        configured(config(section))


@pytest.mark.parametrize(
    ("recipe", "words"), [("streaming+int4", "token policy"), ("nope", "unknown method"), ("int4;x=exact", "override")]
)
def test_recipes_that_are_refused(recipe, words):
    with pytest.raises(UserError, match=words):
        configured(config({"recipe": recipe}))


def engine_of(folder) -> SimpleNamespace:
    """A configuration of vLLM for a small Llama, as far as it is read."""
    hf = LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64
    )  # fmt: skip
    model = SimpleNamespace(hf_config=hf, model=str(folder), get_head_size=lambda: 64)
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=1))


def test_recipes_by_layer(tmp_path):
    engine = engine_of(tmp_path)
    choice = configured(config({"recipe": "turboquant/uniform:bits=3;0=exact;-1=polarquant"}))
    assert pages_of(choice, engine, 0, 2) is None
    middle, last = (pages_of(choice, engine, layer, 2).slots for layer in (1, 3))
    assert (type(middle.keys).__name__, type(middle.values).__name__) == ("TurboQuant", "Uniform")
    assert type(last.values).__name__ == "PolarQuant"
    assert middle.token_bytes != last.token_bytes
    with pytest.raises(UserError, match="exact keys and exact values"):
        pages_of(configured(config({"recipe": "exact/int4"})), engine, 0, 2)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("trellis", "needs a calibration: make one with `tersekv calibrate"),
        ("trellis:calibration=prompt", "use calibration=corpus"),
        ("qjl", "it is fitted on every prompt"),
        ("kvquant:calibration=prompt", "use calibration=corpus"),
        ("kvquant:ranges=online,table=int", r"use outliers=0|fitted on every prompt"),
        ("uniform:axis=channel,group=64", "blocks hold 64 tokens"),
    ],
)
def test_recipes_that_cannot_be_served(recipe, words, tmp_path):
    with pytest.raises(UserError, match=words):
        pages_of(configured(config({"recipe": recipe})), engine_of(tmp_path), 1, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_type": "encoder"}, "type 'encoder'"),
        ({"cache_dtype": "fp8"}, "'fp8'"),
        ({"head_dim": 72}, "head dim is 72"),
        ({"sharing": "layers.3"}, "shares the cache of layers.3"),
        ({"page_tokens": 48}, "pages hold 48 tokens"),
        ({"options": {"a sliding window": 64, "ALiBi": None}}, "asks for a sliding window"),
    ],
)
def test_layers_that_cannot_be_packed(change, words):
    usual = {"head_dim": 64, "options": {}, "cache_dtype": "auto", "attn_type": "decoder", "sharing": None}
    usual |= {"page_tokens": 128}
    assert why_not_layer(**usual) is None
    assert words in why_not_layer(**(usual | change))


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("model_config", {"is_mm_prefix_lm": True}, "read in both directions"),
        ("model_config", {"rswa_window": 64}, "reference sliding windows"),
        ("attention_config", {"use_non_causal": True}, "read in both directions"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "context parallelism"),
        ("parallel_config", {"prefill_context_parallel_size": 2}, "context parallelism"),
        ("speculative_config", {"enable_adaptive_verification": True, "num_speculative_tokens": 3}, "adaptive verif"),
        ("speculative_config", {"enable_adaptive_verification": False, "num_speculative_tokens": 31}, "more than 30"),
        (
            "speculative_config",
            {"uses_draft_kv_cache": lambda: True, "enable_adaptive_verification": False, "num_speculative_tokens": 3},
            "drafts with a cache of their own",
        ),
        ("kv_transfer_config", {}, "a KV connector"),
    ],
)
def test_engines_whose_layers_cannot_be_packed(part, change, words):
    engine = SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=False, rswa_window=None),
        attention_config=SimpleNamespace(use_non_causal=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        speculative_config=None,
        kv_transfer_config=None,
    )
    assert why_not_engine(engine) is None
    setattr(engine, part, SimpleNamespace(**(vars(getattr(engine, part) or SimpleNamespace()) | change)))
    assert words in why_not_engine(engine)


def test_a_backend_that_vllm_keeps_refuses_the_recipe_of_a_later_engine(monkeypatch):
    """Fakes replace the few vLLM objects that are used; tests/serving has the real ones."""

    class Native:
        """vLLM's own backend."""

        @staticmethod
        def get_impl_cls() -> type:
            return int

    current: list[SimpleNamespace] = [config(None)]
    members = {"FLASH_ATTN": SimpleNamespace(value="somewhere.Native")}
    fakes = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: current[0]},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_name="cuda")},
        "vllm.utils.import_utils": {"resolve_obj_by_qualname": {"somewhere.Native": Native}.__getitem__},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": type("Enum", (dict,), {"__members__": members})(members)
        },
    }
    for name, contents in fakes.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tersekv.serving.vllm.others", raising=False)
    others = importlib.import_module("tersekv.serving.vllm.others")
    kept = others.FLASH_ATTN
    assert (kept.__name__, kept.__qualname__, kept.__module__) == (Native.__name__, Native.__qualname__, __name__)
    assert issubclass(kept, Native)
    assert kept.get_impl_cls() is int
    current[0] = config({"recipe": "int4"})
    with pytest.raises(UserError, match="recipe 'int4' cannot be served: vLLM has chosen its backend FLASH_ATTN"):
        kept.get_impl_cls()
    with pytest.raises(UserError, match="cannot be served"):
        _ = others.FLASH_ATTN
    current[0] = config(None)
    assert kept.get_impl_cls() is int
