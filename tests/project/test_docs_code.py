"""Code in README.md and docs/: Python blocks run with a tiny model in place of the default one, README's commands run,
other commands parse, and programs and make targets exist.

A block after the line `<!-- not run: reason -->` is left out.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from tersekv import cli
from tersekv.models import loading as store
from tersekv.models.config import cache_shape
from tersekv.sizes.estimate import break_even

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """A fenced block of code. skipped: the reason why it is not run, if there is one."""

    language: str
    code: str
    skipped: str


def blocks(page: Path) -> list[Block]:
    """Fenced blocks of a page in order."""
    fence = re.compile(r"(?:^<!-- not run: (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(language, code, why) for why, language, code in fence.findall(page.read_text(encoding="utf-8"))]


def commands(page: Path, program: str) -> list[str]:
    """Lines of a page's blocks without language that begin with this program, without comments."""
    found = []
    for block in blocks(page):
        if block.language == "":
            for line in block.code.replace("\\\n", " ").splitlines():
                if line.split(" ")[0].rsplit("/", 1)[-1] == program:
                    found.append(line.split(" #", 1)[0].strip())
    return found


def name(page: Path) -> str:
    """Path of a page from the root."""
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory):
    """A model in place of the default one, with the tiny one's tokens.

    It has enough layers and heads for a cache whose tables are small beside its tokens, and a long context."""
    folder = tmp_path_factory.mktemp("small")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(folder)
    config.num_hidden_layers, config.num_key_value_heads, config.max_position_embeddings = 8, 2, 16384
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder to work in, with the texts that the examples read: part of them, since a byte is a token here."""
    (tmp_path / "docs").mkdir()
    for text in ("LICENSE", "docs/transformers.md"):
        (tmp_path / text).write_text((ROOT / text).read_text()[:4096])
    monkeypatch.chdir(tmp_path)


WITH_PYTHON = [page for page in PAGES if any(b.language == "python" and not b.skipped for b in blocks(page))]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=name)
def test_python_blocks(page, small, checkout, monkeypatch, capsys):
    """Blocks of one page share their names, as a reader's session does."""
    load = store.load
    monkeypatch.setattr(store, "load", lambda model: load(small if model == "smollm2" else model))
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python" and not block.skipped:
            exec(compile(block.code, name(page), "exec"), names)
    if page.name == "README.md":
        said = capsys.readouterr().out
        printed = next(b.code for b in blocks(page) if b.language == "text")
        assert said.startswith(printed)  # of the block that needs no model
        assert "'codes'" in said
        found = re.search(r"([\d.]+) times smaller than in bfloat16", said)
        assert found
        assert float(found[1]) > 1


def test_skipped_blocks_have_a_reason():
    for page in PAGES:
        marks = re.findall(r"^<!-- not run:", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(marks) == sum(bool(block.skipped) for block in blocks(page))


def test_the_examples_text_is_long_enough(smollm2):
    """With the model of the examples it fits the context, and packing gains by far."""
    model, tokenizer = smollm2
    tokens = len(tokenizer((ROOT / "LICENSE").read_text())["input_ids"])
    least = break_even(cache_shape(model.config), "default")
    assert least is not None
    assert 2 * least < tokens < model.config.max_position_embeddings - 256


README_COMMANDS = commands(ROOT / "README.md", "tersekv")


@pytest.mark.parametrize("command", [c for c in README_COMMANDS if c.split()[1] not in ("chat", "serve")])
def test_command_of_the_readme(command, small, checkout, capsys):
    arguments = shlex.split(command)[1:]
    if arguments[0] in ("generate", "eval", "prompt-cache"):
        arguments += ["--model", small]
    if arguments[0] == "eval":
        arguments += ["--context", "64", "--prefix", "32", "--windows", "1", "--text", "LICENSE"]
    assert cli.run(arguments) == 0
    said = capsys.readouterr().out
    assert said.strip()
    assert "times as large as in bfloat16" not in said


def test_the_readme_has_commands():
    assert {c.split()[1] for c in README_COMMANDS} == {
        *("list", "generate", "prompt-cache", "eval", "choose", "chat", "serve")
    }


WRITTEN = [(name(page), line) for page in PAGES for line in commands(page, "tersekv")]


@pytest.mark.parametrize(("page", "line"), WRITTEN, ids=lambda value: value[:60])
def test_commands_parse(page, line):
    """Every command and option exists; FILE, DIR and … stand for something."""
    words = [word for word in shlex.split(line)[1:] if word != "…"]
    command = typer.main.get_command(cli.app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(command.name, words)


PROGRAMS = sorted({(name(page), line) for page in PAGES for line in commands(page, "python")})


@pytest.mark.parametrize(("page", "line"), PROGRAMS, ids=lambda value: value[:60])
def test_programs_exist(page, line):
    """Files that Python is to run exist and name every option."""
    words = shlex.split(line)
    if words[1] in ("-m", "-c"):
        return
    source = ROOT / words[1]
    assert source.is_file(), line
    text = source.read_text(encoding="utf-8")
    for imported in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE):
        beside = source.with_name(f"{imported}.py")
        text += beside.read_text(encoding="utf-8") if beside.is_file() else ""
    for option in (word for word in words[2:] if word.startswith("--")):
        assert f'"{option}"' in text, option


def test_make_targets_exist():
    makefile, text = (ROOT / "Makefile").read_text(), "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for target in re.findall(r"`make ([\w-]+)", text) + re.findall(r"^make ([\w-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
