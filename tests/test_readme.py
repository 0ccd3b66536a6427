"""The README's commands, run as written: the Python block and the program's calls, with a tiny
model."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tersekv import cli
from tersekv.cache.estimate import break_even
from tersekv.hf import models as store
from tersekv.hf.config import cache_shape

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    parts = re.split(r"^```(\w*)\n", README, flags=re.MULTILINE)  # text, fence, block, fence, text, …
    return [block for fence, block in zip(parts[1::4], parts[2::4], strict=True) if fence == language]


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    """Build a model to replace the default one, with the tiny one's tokenizer.

    It has enough layers and heads for tables to be small compared with tokens, and a context for
    the examples' text.
    """
    folder = tmp_path_factory.mktemp("small")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(folder)
    config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings = 8, 2, 16384
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Make a working folder with the text that the examples read, shortened because a byte is a
    token here."""
    (tmp_path / "LICENSE").write_text((ROOT / "LICENSE").read_text()[:4096])
    monkeypatch.chdir(tmp_path)


def test_python_block(small, checkout, monkeypatch, capsys):
    load = store.load
    monkeypatch.setattr(store, "load", lambda name: load(small if name == "smollm2" else name))
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert "'codes'" in said
    found = re.search(r"([\d.]+) times smaller than in bfloat16", said)
    assert found
    assert float(found[1]) > 1


def test_the_examples_text_is_long_enough(smollm2):
    """With the examples' model it fits the context, and packing saves most of the memory."""
    model, tokenizer = smollm2
    tokens = len(tokenizer((ROOT / "LICENSE").read_text())["input_ids"])
    least = break_even(cache_shape(model.config), "default")
    assert least is not None
    assert 2 * least < tokens < model.config.max_position_embeddings - 256


COMMANDS = [
    line.split("#", 1)[0].strip()
    for block in blocks("")
    for line in block.splitlines()
    if line.startswith("tersekv ") and "/" not in line.split()[0]
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, small, checkout, capsys):
    arguments = shlex.split(command)[1:]
    if arguments[0] in ("generate", "eval", "plot", "prompt-cache"):
        arguments += ["--model", small]
    if arguments[0] == "eval":
        arguments += ["--context", "64", "--windows", "1"]
    assert cli.run(arguments) == 0
    said = capsys.readouterr().out
    assert said.strip()
    assert "times as large as in bfloat16" not in said


def test_there_are_commands():
    assert {c.split()[1] for c in COMMANDS} == {
        "list",
        "generate",
        "estimate",
        "prompt-cache",
        "eval",
        "plot",
        "models",
        "env",
        "bench",
    }


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)", README) + re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
