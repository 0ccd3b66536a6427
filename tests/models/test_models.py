"""Models by name: a pull is complete or has no effect, despite interruptions and damage. Nothing is
downloaded."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tersekv.calibration import text
from tersekv.errors import UserError
from tersekv.models import convert, loading
from tersekv.models import pull as pulling

GGUF_NAME = "tiny_package/tiny.gguf"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def byte_letters() -> list[str]:
    """Return GPT-2's printable characters for the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def write_gguf(path: Path, eos: int = 2) -> None:
    """Write a Llama of two layers with random weights and a byte-level tokenizer in llama.cpp's
    layout."""
    import gguf

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = byte_letters()
    vocabulary = [*specials, *letters, letters[70] + letters[71], letters[72] + letters[73]]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_rope_dimension_count(SHAPE["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3] * len(specials) + [1] * 258)
    writer.add_token_merges([f"{letters[70]} {letters[71]}", f"{letters[72]} {letters[73]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_chat_template(TEMPLATE)
    config = LlamaConfig(**SHAPE, vocab_size=len(vocabulary), tie_word_embeddings=True)
    torch.manual_seed(0)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers": "blk",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, weight in LlamaForCausalLM(config).state_dict().items():
        if name == "lm_head.weight":
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, weight.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Package:
    """A wheel with a tiny model, and a fake pip that copies it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        gguf_file = folder / "tiny.gguf"
        write_gguf(gguf_file)
        self.wheel = folder / "tiny_package-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.write(gguf_file, GGUF_NAME)
        self.model = convert.PackagedModel(
            name="tiny",
            title="a tiny model",
            package="tiny-package",
            version="1.0",
            wheel_sha256=digest(self.wheel),
            gguf=GGUF_NAME,
            gguf_sha256=digest(gguf_file),
            download_bytes=self.wheel.stat().st_size,
            eos_token="<|im_end|>",
            config=SHAPE,
        )
        self.calls = folder / "calls"

    def pip(self, body: str = "shutil.copy(WHEEL, DEST)") -> list[str]:
        """Return a command that acts as `pip download` by running `body`."""
        script = self.folder / "pip.py"
        lines = [
            "import shutil, sys, time, pathlib",
            f"WHEEL = {str(self.wheel)!r}",
            "DEST = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])",
            f"with open({str(self.calls)!r}, 'a') as log: log.write(' '.join(sys.argv[1:]) + chr(10))",
            body,
        ]
        script.write_text("\n".join(lines))
        return [sys.executable, str(script)]

    def times_called(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package(tmp_path_factory.mktemp("package"))


@pytest.fixture
def package(built: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Return the package with its own cache folder and its fake pip installed."""
    built.calls.unlink(missing_ok=True)
    monkeypatch.setenv("TERSEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(loading.KNOWN, "tiny", built.model)
    command = built.pip()
    monkeypatch.setattr(pulling, "pip_command", lambda: command)
    return built


def leftovers() -> list[str]:
    return sorted(p.name for p in (loading.cache_dir() / "models").iterdir() if "partial" in p.name)


def test_pull_converts_and_second_call_does_nothing(package: Package) -> None:
    lines: list[str] = []
    folder = loading.pull("tiny", report=lines.append)
    assert folder == loading.cache_dir() / "models" / "tiny"
    assert [line.split()[0] for line in lines] == ["downloading", "unpacking", "converting"]
    assert {p.name for p in folder.iterdir()} >= {
        "manifest.json",
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    }
    assert not list(folder.glob("*.gguf"))
    assert leftovers() == []
    before = {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    assert loading.pull("tiny", report=lines.append) == folder
    assert package.times_called() == 1
    assert len(lines) == 3
    assert before == {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}
    called = package.calls.read_text()
    assert "--no-deps" in called
    assert called.endswith(" tiny-package==1.0\n")


def test_pulled_model_loads_and_generates(package: Package, capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = loading.load("tiny")
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 256
    ids = text.input_ids(tokenizer, text.question_prompt(tokenizer, "A text.", "Which?"), model.config, 4)
    assert tokenizer.decode(ids[0]) == "<|im_start|>user\nA text.\n\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert out.shape[1] == ids.shape[1] + 4
    assert "Converting" not in capfd.readouterr().err


def test_converted_weights_are_those_of_the_gguf(package: Package) -> None:
    """GGUF stores query and key rows in another order. All weights must be finite and tied as
    configured."""
    model, _ = loading.load("tiny")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.isfinite(p).all() for p in model.parameters())
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=261, tie_word_embeddings=True)).state_dict()
    ours = model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    torch.testing.assert_close(ours, made["model.layers.1.mlp.up_proj.weight"], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("field", "said"), [("wheel_sha256", "the download tiny_package-1.0"), ("gguf_sha256", "tiny.gguf inside")]
)
def test_wrong_hash_is_never_used(package: Package, monkeypatch: pytest.MonkeyPatch, field: str, said: str) -> None:
    monkeypatch.setitem(loading.KNOWN, "tiny", replace(package.model, **{field: "0" * 64}))
    with pytest.raises(UserError, match=said) as caught:
        loading.pull("tiny")
    assert "expected 0000" in str(caught.value)
    assert not loading.folder_of("tiny").exists()
    assert leftovers() == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit('ERROR: No matching distribution found for tiny-package==1.0')", "No matching distribution"),
        ("sys.exit(sys.executable + ': No module named pip')", "ensurepip"),
        ("sys.exit(3)", "exit status 3"),
        ("pass", "could not download"),
        ("DEST.joinpath('tiny_package-1.0-py3-none-any.whl').write_bytes(open(WHEEL, 'rb').read()[:999])", "SHA-256"),
    ],
    ids=["not-in-index", "no-pip", "fails-silently", "leaves-nothing", "truncated"],
)
def test_failing_download(package: Package, monkeypatch: pytest.MonkeyPatch, body: str, said: str) -> None:
    command = package.pip(body)
    monkeypatch.setattr(pulling, "pip_command", lambda: command)
    with pytest.raises(UserError, match=said):
        loading.pull("tiny")
    assert not loading.folder_of("tiny").exists()
    assert leftovers() == []


def test_unfaithful_conversion_is_refused(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = replace(package.model, eos_token="<end>", config={**SHAPE, "max_position_embeddings": 512})
    monkeypatch.setitem(loading.KNOWN, "tiny", wanted)
    with pytest.raises(UserError, match="max_position_embeddings is 256, expected 512; end-of-text token"):
        loading.pull("tiny")
    assert not loading.folder_of("tiny").exists()


def truncate(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda f: truncate(f / "model.safetensors"), "bytes instead of"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "not readable"),
        (lambda f: (f / "manifest.json").write_text("[]"), "not readable"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    ],
    ids=["truncated", "no-manifest", "half-manifest", "other-manifest", "no-tokenizer"],
)
def test_damage_is_noticed_and_repaired(package: Package, harm: object, said: str) -> None:
    folder = loading.pull("tiny")
    harm(folder)  # type: ignore[operator]
    assert said in str(loading.damage("tiny"))
    assert next(row for row in loading.list_models() if row.name == "tiny").state.startswith("damaged: ")
    lines: list[str] = []
    loading.pull("tiny", report=lines.append)
    assert said in lines[0]
    assert loading.damage("tiny", verify=True) is None
    assert leftovers() == []


def test_flipped_bit_is_found_by_verify(package: Package) -> None:
    folder = loading.pull("tiny")
    flip(folder / "model.safetensors")
    assert loading.damage("tiny") is None
    assert loading.damage("tiny", verify=True) == "the SHA-256 of model.safetensors is not the manifest's"
    loading.pull("tiny", verify=True)
    assert loading.damage("tiny", verify=True) is None


PULL_IN_A_PROCESS = """
    from pathlib import Path
    from tersekv.models import convert, pull
    model = convert.PackagedModel(**{fields!r})
    pull.pip_command = lambda: {command!r}
    pull.pull(model, Path({folder!r}), lambda line: print(line, flush=True))
"""


def start_pull(package: Package, command: list[str]) -> subprocess.Popen[str]:
    fields = {name: getattr(package.model, name) for name in package.model.__dataclass_fields__}
    code = textwrap.dedent(PULL_IN_A_PROCESS).format(
        fields=fields, command=command, folder=str(loading.folder_of("tiny"))
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_killed_pull_leaves_nothing_that_is_used(package: Package) -> None:
    half = "DEST.joinpath('half.whl').write_bytes(b'x' * 1000); DEST.joinpath('ready').touch(); time.sleep(60)"
    process = start_pull(package, package.pip(half))
    parent = loading.folder_of("tiny").parent
    for _ in range(600):
        if list(parent.glob(".tiny.partial-*/ready")):
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(leftovers()) == 1
    assert not loading.folder_of("tiny").exists()
    package.pip()
    loading.pull("tiny")
    assert loading.damage("tiny", verify=True) is None
    assert leftovers() == []


def test_two_pulls_at_once_download_once(package: Package) -> None:
    pytest.importorskip("fcntl", reason="the lock needs fcntl")
    command = package.pip("time.sleep(1); shutil.copy(WHEEL, DEST)")
    both = [start_pull(package, command) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert package.times_called() == 1, said
    assert loading.damage("tiny", verify=True) is None
    assert leftovers() == []


def test_cache_folder_that_cannot_be_written(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TERSEKV_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="TERSEKV_CACHE"):
        loading.pull("tiny")


def test_cache_folder_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERSEKV_CACHE", raising=False)
    assert loading.cache_dir().name == "tersekv"


# ---------------------------------------------------------------- folders and Hub ids


@pytest.fixture
def folder(package: Package) -> Path:
    """Return a local model."""
    return loading.pull("tiny")


def test_local_folder_loads(folder: Path) -> None:
    model, _ = loading.load(str(folder), dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert loading.load_config(str(folder)).num_hidden_layers == 2
    assert loading.resolve(str(folder)) == str(folder)


def header_only(path: Path) -> None:
    path.write_bytes(b"\xff" * 4)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (truncate, "bytes instead of"),
        (header_only, "4 bytes"),
        (lambda p: p.write_bytes((1 << 40).to_bytes(8, "little") + b"{}"), "header ends after the file"),
        (lambda p: p.write_bytes((2).to_bytes(8, "little") + b"[]"), "header is not readable"),
    ],
    ids=["truncated", "few-bytes", "huge-header", "no-header"],
)
def test_corrupt_local_weights_are_named(folder: Path, harm: object, said: str) -> None:
    path = folder / "model.safetensors"
    harm(path)  # type: ignore[operator]
    with pytest.raises(UserError, match=said) as caught:
        loading.load(str(folder))
    assert str(path) in str(caught.value)


def test_missing_shard_and_broken_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors is not a whole safetensors file \(missing"):
        loading.load(str(folder))
    index.write_text("{}")
    with pytest.raises(UserError, match="not a readable index"):
        loading.load(str(folder))


def test_missing_tensors_are_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    kept = {k: v for k, v in load_file(path).items() if "layers.1.mlp" not in k}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="lack 3 tensors"):
        loading.load(str(folder))


def test_broken_config_is_one_sentence(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UserError, match="cannot be loaded"):
        loading.load_config(str(folder))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "", "~/nothing-here"])
def test_path_that_is_not_there(name: str) -> None:
    with pytest.raises(UserError, match="not there"):
        loading.load(name)


def test_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(UserError, match="a file, not a folder"):
        loading.resolve(str(tmp_path / "model.bin"))


def test_hub_id_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to the Hub\nsecond line")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", offline)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    with pytest.raises(UserError, match="from the Hub: We couldn't connect") as caught:
        loading.load("smolm2")
    assert "did you mean 'smollm2'" in str(caught.value)
    with pytest.raises(UserError, match="from the Hub"):
        loading.load_config("owner/name")


def test_unknown_name() -> None:
    with pytest.raises(UserError, match="did you mean 'smollm2'"):
        loading.pull("smolm2")


def test_default_config_needs_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERSEKV_CACHE", str(tmp_path))
    config = loading.load_config("smollm2")
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (30, 3, 64)
    assert list(tmp_path.iterdir()) == []
    assert loading.list_models()[0].state == "not pulled"


def test_quiet_puts_transformers_settings_back() -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with pytest.raises(RuntimeError, match="inside"), loading.quiet():
        raise RuntimeError("inside")
    assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())


# ---------------------------------------------------------------- text


def test_pydoc_text_is_the_language_reference() -> None:
    corpus = text.pydoc_text()
    assert len(corpus) > 300_000
    assert corpus.startswith('The "assert" statement')


def test_pydoc_document_has_the_length_asked_for(folder: Path) -> None:
    tokenizer = loading.load_tokenizer(str(folder))
    document = text.pydoc_document(tokenizer, 500)
    assert len(tokenizer(document)["input_ids"]) == 500
    assert text.pydoc_text().startswith(document)
    drawn = [text.pydoc_document(tokenizer, 50, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    near_end = text.pydoc_document(tokenizer, 300, offset=len(text.pydoc_text()) - 20)
    assert len(tokenizer(near_end)["input_ids"]) == 300
    with pytest.raises(UserError, match="at least 1"):
        text.pydoc_document(tokenizer, 0)


def test_prompt_longer_than_the_context(folder: Path) -> None:
    tokenizer, config = loading.load_tokenizer(str(folder)), loading.load_config(str(folder))
    with pytest.raises(UserError, match=r"has 300 tokens and 10 are to follow.* 256.* by 54 tokens"):
        text.input_ids(tokenizer, "x" * 300, config, 10, template=False)
    with pytest.raises(UserError, match="empty"):
        text.input_ids(tokenizer, "", config)


def test_prompt_without_a_chat_template(folder: Path) -> None:
    tokenizer = loading.load_tokenizer(str(folder))
    tokenizer.chat_template = None
    assert text.question_prompt(tokenizer, "A text.", "Which?") == "A text.\n\nWhich?"
    assert text.question_prompt(tokenizer, "", "Which?") == "Which?"


# ---------------------------------------------------------------- the real model, where it is already


def test_real_default_model() -> None:
    if loading.damage("smollm2") is not None:
        pytest.skip("smollm2 is not pulled on this machine: run `tersekv models pull smollm2`")
    assert loading.damage("smollm2", verify=True) is None
    model, tokenizer = loading.load("smollm2")
    assert model.config.max_position_embeddings == 8192
    prompt = text.question_prompt(tokenizer, "", "What is the capital of France?")
    ids = text.input_ids(tokenizer, prompt, model.config, 12)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids.shape[1] :])


def test_download_errors_say_what_to_do(monkeypatch) -> None:
    """Also for models that are not known by name."""
    with pytest.raises(UserError, match="cannot get the model 'some/model' from the Hub") as error:
        loading.load_config("some/model")
    said = str(error.value)
    for part in ("hf download some/model --local-dir FOLDER", "--model FOLDER", "HF_HUB_OFFLINE=1", "smollm2"):
        assert part in said
    with pytest.raises(UserError, match="did you mean 'smollm2'"):
        loading.load_config("smolm2")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"has no config.json, so it is not a model folder; give the folder that has it"
    ):
        loading.load_tokenizer(str(tmp_path))
    (tmp_path / "some.gguf").touch()
    with pytest.raises(UserError, match=r"or a GGUF file, of which it holds some\.gguf"):
        loading.load_config(str(tmp_path))
