"""GGUF files as models: they are converted once, give the weights that were stored, and damaged
ones are refused with one sentence. Nothing is downloaded."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tersekv
from made_gguf import CHATML, GEMMA, leftovers, model_of, write
from made_gguf import path as path
from tersekv import UserError, cli
from tersekv.hf.facts import load_shape
from tersekv.models import convert, loading
from tersekv.models import pull as pulling
from tersekv.models.config import cache_shape

pytestmark = pytest.mark.usefixtures("empty_cache")


IDS = torch.arange(3, 63)[None]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_loads_the_model_that_was_written(tmp_path: Path, architecture: str) -> None:
    """60 tokens are more than the window of Gemma 3, so layer kinds and both RoPEs matter."""
    path = tmp_path / "a model.gguf"
    made = write(path, architecture)
    model, tokenizer = tersekv.load_model(str(path))
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, made(IDS).logits, rtol=1e-4, atol=1e-5)
    assert not model.training
    assert model.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == made.config.tie_word_embeddings
    assert tokenizer.model_max_length == 256
    out = model.generate(IDS, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert out.shape[1] == IDS.shape[1] + 4
    assert not getattr(model.config, "quantization_config", None)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_estimate_reads_the_shape_without_converting(tmp_path: Path, empty_cache: Path, architecture: str) -> None:
    path = tmp_path / "tiny.gguf"
    made = write(path, architecture)
    shape, weights = load_shape(str(path), with_weights=True)
    assert not empty_cache.exists()
    model, _ = loading.load(str(path))
    assert shape == cache_shape(model.config)
    assert weights == 2 * sum(p.numel() for p in made.parameters())
    assert {k: v for k, v in loading.load_config(str(path)).to_dict().items() if k != "architectures"} == {
        k: v for k, v in model.config.to_dict().items() if k not in ("architectures", "_name_or_path")
    } | {"_name_or_path": ""}


def test_second_load_converts_nothing(path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    loading.load(str(path), report=lines.append)
    assert [line.split()[0] for line in lines] == ["reading", "converting"]
    (folder,) = (empty_cache / "models").glob("gguf-*")
    assert {p.name for p in folder.iterdir()} >= {"manifest.json", "model.safetensors", "chat_template.jinja"}
    assert leftovers(empty_cache) == []
    assert loading.resolve(str(path)) == str(folder)
    monkeypatch.setattr(pulling, "convert", lambda *_: pytest.fail("converted again"))
    loading.load(str(path), report=lines.append)
    again = path.with_name("the same content.bin")
    again.write_bytes(path.read_bytes())
    assert loading.pull(str(again)) == folder
    assert next(row for row in loading.list_models() if row.where == folder).title == str(path)


def test_digest_is_kept_until_the_file_changes(path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(time, "time", lambda: path.stat().st_mtime + 10)
    first = pulling.digest_of(path, empty_cache, lines.append)
    assert pulling.digest_of(path, empty_cache, lines.append) == first == pulling.sha256(path)
    assert len(lines) == 1
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert pulling.digest_of(path, empty_cache, lines.append) == pulling.sha256(path) != first
    (empty_cache / "broken").mkdir()
    for kept in empty_cache.iterdir():
        if kept.is_file():
            kept.write_text("not a digest")
    assert pulling.digest_of(path, empty_cache, lines.append) == pulling.sha256(path)


def test_digest_of_a_file_just_written_is_not_kept(path: Path, empty_cache: Path) -> None:
    pulling.digest_of(path, empty_cache, print)
    assert not empty_cache.exists()


@pytest.mark.parametrize(("dtype", "loaded"), [("auto", torch.float16), ("bfloat16", torch.bfloat16)])
def test_types_of_weights(tmp_path: Path, dtype: str, loaded: torch.dtype) -> None:
    """A file of 16-bit floats keeps their type; the caller may choose another."""
    write(tmp_path / "half.gguf", dtype=np.float16)
    model, _ = loading.load(str(tmp_path / "half.gguf"), dtype=dtype)
    assert model.dtype == loaded


def test_quantised_values_are_stored_exactly(tmp_path: Path) -> None:
    """bfloat16 would round them, so they are stored as float32."""
    import gguf

    model = model_of("llama")
    wanted = {}
    for name, weight in model.state_dict().items():
        if "up_proj" in name:
            packed = gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0)
            wanted[name] = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0).copy())
            weight.copy_(wanted[name])
    write(tmp_path / "q.gguf", model=model)
    loaded, _ = loading.load(str(tmp_path / "q.gguf"))
    for name, weight in wanted.items():
        assert torch.equal(loaded.state_dict()[name], weight)


# ---------------------------------------------------------------- tokens and templates


@pytest.mark.parametrize(
    ("architecture", "values", "template", "ends"),
    [
        ("qwen2", {}, CHATML, [2, 0]),  # the end of a text without a template is added
        ("qwen2", {"tokenizer__ggml__eos_token_id": 0}, CHATML, [0, 2]),
        ("gemma3", {}, GEMMA, [1, 5]),
        ("gemma3", {}, None, 1),
        ("gemma3", {"tokenizer__ggml__eos_token_id": 5}, GEMMA, [5, 1]),
        ("llama", {"tokenizer__ggml__eos_token_id": 0, "tokenizer__ggml__eot_token_id": 7}, None, [0, 7]),
    ],
    ids=["turn-named", "text-named", "gemma", "base-model", "gemma-turn-named", "eot-named"],
)
def test_generation_ends_at_turns_and_texts(
    tmp_path: Path, architecture: str, values: dict[str, Any], template: str | None, ends: Any
) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, architecture, template=template, **values)
    model, tokenizer = loading.load(str(path))
    assert tokenizer.chat_template == template
    assert model.generation_config.eos_token_id == ends
    first = ends if isinstance(ends, int) else ends[0]
    assert tokenizer.eos_token_id == model.config.eos_token_id == first
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    write(tmp_path / "gemma.gguf", "gemma3")
    write(tmp_path / "qwen.gguf", "qwen2")
    gemma, qwen = (loading.load_tokenizer(str(tmp_path / f"{name}.gguf")) for name in ("gemma", "qwen"))
    assert gemma("a")["input_ids"][0] == gemma.bos_token_id == 2
    assert qwen("a")["input_ids"] != [qwen.bos_token_id, *qwen("a", add_special_tokens=False)["input_ids"]]
    assert gemma.decode(gemma("a b", add_special_tokens=False)["input_ids"]) == "a b"


def test_configs_beside_the_file_are_not_read(path: Path) -> None:
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        path.with_name(name).write_text('{"extra_special_tokens": ["<extra>"], "eos_token_id": 9}')
    path.with_name("chat_template.jinja").write_text("other")
    model, tokenizer = loading.load(str(path))
    assert tokenizer.chat_template == CHATML
    assert "<extra>" not in tokenizer.get_vocab()
    assert model.generation_config.eos_token_id == [2, 0]


# ---------------------------------------------------------------- shapes that transformers does not read


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """Return llama.cpp's factors of each frequency."""
    found = []
    for i in range(0, head_dim, 2):
        length = 2 * np.pi * theta ** (i / head_dim)
        smooth = (8192 / length - 1) / 3
        found.append(1 if length < 2048 else factor if length > 8192 else 1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


LINEAR = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 64}


@pytest.mark.parametrize(
    ("architecture", "values", "fields"),
    [
        ("gemma3", LINEAR, {"rope_type": "linear", "factor": 8.0}),
        ("qwen2", YARN, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    ],
)
def test_scaled_ropes(tmp_path: Path, architecture: str, values: dict[str, Any], fields: dict[str, Any]) -> None:
    """Gemma 3 scales its full layers alone."""
    path = tmp_path / "tiny.gguf"
    write(path, architecture, **values)
    model, _ = loading.load(str(path))
    parameters = model.config.rope_parameters
    assert fields.items() <= parameters.get("full_attention", parameters).items()
    assert parameters.get("sliding_attention", {}).get("rope_type", "default") == "default"
    options = {name: fields for name in parameters if name == "full_attention"}
    theta = {"rope_theta": parameters.get("full_attention", parameters)["rope_theta"]}
    wanted = parameters | {"full_attention": fields | theta} if options else fields | theta
    made = model_of(architecture, rope_parameters=wanted)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, made(IDS).logits, rtol=1e-4, atol=1e-5)


def test_llama3_rope(tmp_path: Path) -> None:
    path, theta = tmp_path / "tiny.gguf", 500_000.0
    factors = llama3_factors(8, theta, 32.0)
    assert len(set(factors)) > 1
    write(path, tensors={"rope_freqs.weight": factors}, rope__freq_base=theta)
    parameters = loading.load_config(str(path)).rope_parameters
    assert parameters["rope_type"] == "llama3"
    assert parameters["factor"] == 32.0
    model, _ = loading.load(str(path))
    torch.testing.assert_close(
        model.model.rotary_emb.inv_freq, torch.from_numpy(theta ** -(np.arange(0, 8, 2) / 8) / factors).float()
    )
    write(path, tensors={"rope_freqs.weight": factors * np.float32([1, 1, 1.1, 1])}, rope__freq_base=theta)
    with pytest.raises(UserError, match="factors that are not Llama 3's"):
        loading.load_config(str(path))


@pytest.mark.parametrize("pattern", [3, [True, True, False]])
def test_layers_with_windows(tmp_path: Path, pattern: Any) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, "gemma3", attention__sliding_window_pattern=pattern)
    shape, _ = load_shape(str(path), with_weights=False)
    assert shape.windows == (24, 24, None)
    assert loading.load(str(path))[0].config.layer_types[-1] == "full_attention"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rope__scaling__type": "longrope"}, "scales its RoPE by 'longrope'"),
        ({"tensors": {"rope_factors_long.weight": np.ones(4, np.float32)}}, "scales its RoPE by 'longrope'"),
        ({"rope__dimension_count": 4, "attention__key_length": 8}, "rotates 4 of 8 channels"),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(32, np.float32)}}, r"also has 1 \(blk.0.attn_q.bias"),
        ({"attention__head_count": None}, "could not be converted|lacks metadata|other tensors"),
        ({"split__count": 3}, "one of 3 parts"),
        ({"named": "clip"}, r"architecture clip, which is not readable from GGUF; readable are .*gemma3.*llama.*qwen2"),
    ],
    ids=["longrope", "factors", "partial", "biases", "no-heads", "part", "architecture"],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, empty_cache: Path, capfd: pytest.CaptureFixture[str], values: dict[str, Any], said: str
) -> None:
    path = tmp_path / "tiny.gguf"
    write(path, **values)
    with pytest.raises(UserError, match=said) as caught:
        loading.load(str(path))
    assert "\n" not in str(caught.value)
    assert leftovers(empty_cache) == []
    assert not list((empty_cache / "models").glob("gguf-*"))
    assert cli.run(["generate", "--model", str(path), "-p", "x"]) == 2
    assert "Traceback" not in capfd.readouterr().err


# ---------------------------------------------------------------- the program


def test_commands_take_a_file(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["estimate", "--model", str(path), "--context", "1k", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["model"] == str(path)
    assert cli.run(["generate", "--model", str(path), "-p", "hello", "--max-new-tokens", "2", "--json"]) == 0
    capfd.readouterr()
    assert cli.run(["models", "pull", str(path), "--json"]) == 0
    folder = json.loads(capfd.readouterr().out)["where"]
    assert cli.run(["models", "verify", str(path)]) == 0
    assert cli.run(["models", "list", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out.splitlines()[-1])["models"]
    assert [row["title"] for row in listed if row["where"] == folder] == [str(path)]


def test_missing_package(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"reading a GGUF file needs gguf, which is not installed: pip install"):
        loading.load(str(path))


def test_readable_architectures_are_decoders() -> None:
    names = convert.readable()
    assert {"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "qwen2moe"} <= set(names)
    assert not {"t5", "general", "tokenizer"} & set(names)
