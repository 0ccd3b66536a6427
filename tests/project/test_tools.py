"""The programs that check prose: what they find, and what they leave alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LONG = " ".join(["word"] * 40)
"""A sentence of any length is allowed, because its reason is part of it."""


def words(path: Path, text: str) -> list[str]:
    """Findings of tools/words.py in a file with this text, without the file's name."""
    path.write_text(text)
    run = subprocess.run([sys.executable, ROOT / "tools" / "words.py", path], capture_output=True, text=True)
    assert run.returncode == (1 if run.stdout else 0), run.stderr
    return [line.removeprefix(f"{path}:") for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("a.py", '"""What it does."""', "1: opens with 'What': open with a noun or a verb"),
        ("a.py", 'x = 1\n"""Of x."""', "2: opens with 'Of': open with a noun or a verb"),
        ("a.py", "x = 1  # it hangs on x", "1: 'hangs on': write depends on"),
        ("a.cpp", f"int x;\n// {LONG}\n// it hangs on x", "3: 'hangs on': write depends on"),
        ("a.md", f"# Title\n\n{'x' * 60} {'y' * 60}", "3: a line of 121 columns: at most 100"),
    ],
)
def test_words_finds(tmp_path, name, text, finding):
    assert [found[: len(finding)] for found in words(tmp_path / name, text)] == [finding]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""Return x. It is short."""\n# type: ignore\nx = "What hangs on a string"'),
        ("a.py", f'"""Return x.\n\nArgs:\n    x: {LONG}.\n"""\n# {LONG}.'),
        ("a.cpp", 'const char* x = "no comment here";  // see https://example.org/a'),
        ("a.md", f"| {LONG} | {LONG} |\n\n```\n{LONG} hangs on\n```\n\n- `{LONG[:80]}` is code."),
    ],
)
def test_words_leaves_alone(tmp_path, name, text):
    assert words(tmp_path / name, text) == []
