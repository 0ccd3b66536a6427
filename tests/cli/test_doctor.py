"""`tersekv doctor`: the installation, and what fits a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf

from conftest import HEAD, MLA, MODELS, SHAPE
from tersekv import cli, versions
from tersekv.cli import installation
from tersekv.errors import UserError
from tersekv.kernels import cpu
from tersekv.models.config import has_key_bias
from test_cli import refuse, run_json, run_text

LARGE = SHAPE | {"head_dim": 64, "max_position_embeddings": 32768}


def saved(folder: Path, config: tf.PreTrainedConfig) -> str:
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def biased(tmp_path: Path) -> str:
    """A config of a model with key biases."""
    return saved(tmp_path / "biased", tf.LlamaConfig(**LARGE, attention_bias=True))


@pytest.fixture
def unbiased(tmp_path: Path) -> str:
    return saved(tmp_path / "unbiased", tf.LlamaConfig(**LARGE))


def examined(capfd: pytest.CaptureFixture[str], status: int, *arguments: str) -> dict:
    """Return the document of a call that gives this exit status."""
    assert cli.run(["doctor", *arguments, "--json"]) == status
    return json.loads(capfd.readouterr().out)


# ---------------------------------------------------------------- the installation


def test_installation(empty_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = run_json(capfd, "doctor")
    assert made["packages"]["torch"] == torch.__version__
    assert made["folders"]["models"] == str(empty_cache / "models")
    assert {row["backend"] for row in made["kernels"]} >= {"cpu", "reference"}
    lines = run_text(capfd, "doctor").splitlines()
    assert [line.split()[0] for line in lines] == [check["what"].split()[0] for check in made["checks"]]
    assert len(lines) == 10
    said = run_text(capfd, "doctor", "--all")
    assert "cpu features" in said
    assert "attend_packed" in said


def test_the_cpu_has_family_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine may name only the brand."""
    lines = ["cpu family\t: 6", "model\t\t: 143", "model name\t: Intel", "flags\t: fpu avx2 amx_tile hle", "model\t: 7"]
    monkeypatch.setattr(Path, "read_text", lambda *_: "\n".join(lines))
    assert installation.cpu_features() == ("Intel (family 6, model 143)", ["avx2", "amx_tile"])


def test_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_read(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse_read)
    assert installation.cpu_features()[1] == []
    assert versions.package_version("no-such-package") == "not installed"


def test_broken_installation(
    empty_cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault is said in its line, and the exit status is 1."""

    def old() -> None:
        raise UserError("transformers 4.0 is too old")

    empty_cache.touch()
    monkeypatch.setattr(installation, "check_transformers", old)
    monkeypatch.setattr(cpu, "why_not_built", lambda: "the extension is not built")
    assert cli.run(["doctor"]) == 1
    lines = capfd.readouterr().out.splitlines()
    broken = {
        line.partition("BROKEN: ")[0].strip(): line.partition("BROKEN: ")[2] for line in lines if "BROKEN" in line
    }
    assert broken["transformers"] == "transformers 4.0 is too old"
    assert broken["cpu kernels"] == "the extension is not built"
    assert "set TERSEKV_CACHE to a folder that can be written" in broken["cache folder"]
    assert len(broken) == 3


# ---------------------------------------------------------------- a model


def test_recipes_of_a_model_with_key_biases(biased: str, capfd: pytest.CaptureFixture[str]) -> None:
    recipes = ["turboquant", "qjl", "polarquant", "default", "safe", "kivi:bits=2", "kvquant"]
    made = examined(capfd, 1, biased, *(word for recipe in recipes for word in ("--recipe", recipe)))
    assert made["properties"]["key biases"].startswith("yes")
    assert [one["good"] for one in made["recipes"]] == [False] * 3 + [True] * 4
    assert "codes with an error of" in made["recipes"][0]["reasons"][0]
    assert cli.run(["doctor", biased]) == 0
    assert "key biases    yes" in capfd.readouterr().out
    assert cli.run(["doctor", biased, "--recipe", "turboquant"]) == 1
    assert "turboquant: BAD: the model's keys have biases" in capfd.readouterr().out


def test_recipes_of_a_model_without(unbiased: str, capfd: pytest.CaptureFixture[str]) -> None:
    made = examined(capfd, 0, unbiased, "--recipe", "turboquant", "--recipe", "qjl")
    said = made["properties"]
    assert said["key biases"] == "no"
    assert said["heads"] == "4 query heads, 2 KV heads"
    assert said["context"] == "32,768 tokens"
    assert said["RoPE"] == "default"
    assert said["weights"].endswith("in bfloat16")
    assert all("times smaller" in one["reasons"][0] and "kernel " in one["reasons"][-1] for one in made["recipes"])


def test_recipes_that_do_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A head dim that a method cannot code, a cache that is larger than bfloat16, a policy that is refused."""
    small = saved(tmp_path / "small", tf.LlamaConfig(**SHAPE, **HEAD))
    (one,) = examined(capfd, 1, small, "--recipe", "int4")["recipes"]
    assert "does not divide the head dim 32" in one["reasons"][0]
    short = saved(tmp_path / "short", tf.LlamaConfig(**(LARGE | {"max_position_embeddings": 128})))
    (one,) = examined(capfd, 1, short, "--recipe", "kivi:bits=4")["recipes"]
    assert one["reasons"][0].endswith("bfloat16 at 128 tokens")
    assert one["reasons"][1].startswith("gains from some ")
    latent = saved(tmp_path / "latent", tf.DeepseekV3Config(**(LARGE | {"num_key_value_heads": 4}), **MLA))
    made = examined(capfd, 1, latent, "--recipe", "snapkv+kivi:bits=4")
    assert "latents" in made["properties"]
    assert not made["recipes"][0]["good"]


def test_windows_and_ropes_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gemma = saved(tmp_path / "gemma", MODELS["gemma3"]().config)
    said = examined(capfd, 0, gemma)["properties"]
    assert said["layers"] == "3 with a cache, 2 with a sliding window of 48 tokens"
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    dynamic = saved(tmp_path / "dynamic", tf.LlamaConfig(**LARGE, rope_parameters=scaled))
    assert examined(capfd, 0, dynamic)["properties"]["RoPE"] == "dynamic (changes with the length)"


def test_published_models_are_known_by_name(capfd: pytest.CaptureFixture[str]) -> None:
    made = examined(capfd, 1, "qwen2.5-7b", "--recipe", "turboquant")
    assert made["properties"]["context"] == "131,072 tokens"
    assert (made["context_tokens"], made["weight_bytes_bf16"] > 14e9) == (131_072, True)
    assert made["recipes"][0]["reasons"][0].startswith("the model's keys have biases")
    assert examined(capfd, 0, "llama-3.1-8b", "--recipe", "turboquant")["properties"]["key biases"] == "no"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--recipe", "default"), "--recipe needs a model"),
        (("smollm2", "--all"), "--all is about the installation"),
        (("smollm2", "--recipe", "kivvi"), "unknown method 'kivvi'"),
        (("qwen2.5-8b",), "is not a known published model; similar:"),
    ],
)
def test_bad_input_is_one_line(capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    assert said in refuse(capfd, "doctor", *arguments)


@pytest.mark.parametrize(
    ("family", "answer"), [("qwen2", True), ("llama", False), ("gpt_oss", True), ("gemma3", False), ("phi3", False)]
)
def test_key_biases_of_families(family: str, answer: bool) -> None:
    assert has_key_bias(MODELS[family]().config) is answer


def test_key_biases_of_other_configs() -> None:
    assert has_key_bias(tf.GPT2Config(n_layer=1, n_embd=32, n_head=2)) is True
    assert has_key_bias(tf.GPTNeoXConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2)) is True


# ---------------------------------------------------------------- estimate


def test_estimate_says_what_does_not_fit(biased: str, capfd: pytest.CaptureFixture[str]) -> None:
    both = ["--recipe", "turboquant", "--recipe", "default", "--context", "4k"]
    made = run_json(capfd, "estimate", "--model", biased, *both)
    assert made["recipes"][0]["advice"].startswith("the model's keys have biases")
    assert made["recipes"][1]["advice"] is None
    said = " ".join(run_text(capfd, "estimate", "--model", biased, *both).split())
    assert "turboquant is probably RUINED: the model's keys have biases" in said
    assert said.count("See `tersekv doctor") == 1


def test_estimate_of_other_models_says_nothing(unbiased: str, capfd: pytest.CaptureFixture[str]) -> None:
    for model in (unbiased, "llama-3.1-8b"):
        made = run_json(capfd, "estimate", "--model", model, "--recipe", "turboquant", "--context", "4k")
        assert made["recipes"][0]["advice"] is None
