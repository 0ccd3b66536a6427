"""The README's commands, run as written: the Python block and the program's calls, with a tiny model in place of
the default one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tersekv import cli
from tersekv.hf import models as store

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    parts = re.split(r"^```(\w*)\n", README, flags=re.MULTILINE)  # text, fence, block, fence, text, …
    return [block for fence, block in zip(parts[1::4], parts[2::4], strict=True) if fence == language]


def test_python_block(tiny, monkeypatch, capsys):
    load = store.load
    monkeypatch.setattr(store, "load", lambda name: load(tiny if name == "smollm2" else name))
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), {})
    assert "'codes'" in capsys.readouterr().out


COMMANDS = [
    line.split("#", 1)[0].strip()
    for block in blocks("")
    for line in block.splitlines()
    if line.startswith("tersekv ") and "/" not in line.split()[0]
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # some write files
    arguments = shlex.split(command)[1:]
    if arguments[0] in ("generate", "eval", "plot", "prompt-cache"):
        arguments += ["--model", tiny]
    if arguments[0] == "eval":
        arguments += ["--context", "64", "--windows", "1"]
    assert cli.run(arguments) == 0
    assert capsys.readouterr().out.strip()


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
