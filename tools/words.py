"""Check the rules of plain words that a program can check: docstrings, comments and documents.

    python tools/words.py [PATH …]      # files or folders; default: all that the project has

It checks three rules. A docstring opens with a noun or a verb. Prose in documents breaks at 100 columns. Words that
the field does not use are named with what to write instead. Tables, headings and code blocks of documents are left
out. The length of a sentence is not checked, because a limit cuts the reason off.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("README.md", "CONTRIBUTING.md", "docs", "src", "cpp", "benchmarks", "tests", "tools", "examples")
HISTORY = ("benchmarks/records", "CHANGELOG.md")
"""Left out: records and the list of changes."""

COLUMNS = 100

OPENINGS = re.compile(r"(What|Whether|Of|That|Those|So|Which|Who|Whose|How|Where|With which) ")

INSTEAD = {
    r"hangs? on|hung on": "depends on",
    r"(entry|entries|outliers?|tokens?|channels?) apart": "outlier, sparse entry",
    r"turned mean": "rotated mean",
    r"(take|takes|taken|taking|took) off": "remove",
    r"fetched meanwhile|asked for ahead": "prefetch",
    r"tail of latest": "recent window",
    r"exact first tokens": "attention sinks",
    r"(divided|divides|divide) (by|the) (tokens|heads)": "context parallelism, tensor parallelism",
    r"(is|are|was|were) handed": "passed",
    r"learn(s|t|ed)? from a corpus": "calibrate",
    r"behind one another|one behind the other": "consecutive",
    r"a look\b": "an informal measurement",
    r"foretell\w*": "predict",
    r"(unmake|unmakes|unmade)": "delete",
}
BANNED = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), better) for pattern, better in INSTEAD.items()]


class Prose(NamedTuple):
    """Text of one docstring, comment or paragraph. line: of its first line."""

    line: int
    text: str
    is_docstring: bool = False


class Finding(NamedTuple):
    """A rule that a line breaks."""

    line: int
    what: str


def python_prose(text: str) -> Iterator[Prose]:
    """Docstrings, those of attributes included, and comments; neighbouring comment lines are one text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Prose(node.lineno, node.value.value, True)
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# type:", "# noqa", "# fmt")):
            continue
        alone = token.line.lstrip().startswith("#")
        if block and not (alone and token.start[0] == last + 1):
            yield Prose(first, "\n".join(block))
            block = []
        if not block:
            first = token.start[0]
        block.append(re.sub(r"\s*#?\s*(type: ignore|noqa|pragma).*", "", token.string.lstrip("# ")))
        last = token.start[0]
    if block:
        yield Prose(first, "\n".join(block))


def cpp_prose(text: str) -> Iterator[Prose]:
    """Comments that begin with two strokes; neighbouring lines are one text."""
    block: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        code, mark, comment = line.partition("//")
        alone = bool(mark) and not code.strip()
        if block and not alone:
            yield Prose(first, "\n".join(block))
            block = []
        if alone:
            first = first if block else number
            block.append(comment.strip())
        elif mark and "http" not in line:
            yield Prose(number, comment.strip())


def markdown_prose(text: str) -> Iterator[Prose]:
    """Paragraphs and items of lists; tables, headings, code blocks, HTML and directives are left out."""
    block: list[str] = []
    first, fenced = 0, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            fenced = not fenced
        item = re.match(r"\s*([-*]|\d+\.) ", line)
        other = (
            fenced
            or not stripped
            or stripped.startswith(("#", "|", "<", "```", "~~~", "!!!", "???", ":::", "---", "$$"))
        )
        if block and (other or item):
            yield Prose(first, "\n".join(block))
            block = []
        if not other:
            first = first if block else number
            block.append(line)
    if block:
        yield Prose(first, "\n".join(block))


PROSE = {".py": python_prose, ".cpp": cpp_prose, ".h": cpp_prose, ".md": markdown_prose}


def check(prose: Prose, is_document: bool) -> Iterator[Finding]:
    """Findings of one text."""
    if prose.is_docstring and (found := OPENINGS.match(prose.text.lstrip())):
        yield Finding(prose.line, f"opens with '{found.group(1)}': open with a noun or a verb")
    for pattern, better in BANNED:
        for found in pattern.finditer(prose.text):
            line = prose.line + prose.text[: found.start()].count("\n")
            yield Finding(line, f"'{found.group(0)}': write {better}")
    if is_document:
        for i, line in enumerate(prose.text.split("\n")):
            if len(line) > COLUMNS and " " in line.strip()[:COLUMNS] and "](" not in line and "http" not in line:
                yield Finding(prose.line + i, f"a line of {len(line)} columns: at most {COLUMNS}")


def files(paths: list[Path]) -> Iterator[Path]:
    """Files with prose under these paths."""
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = (
                file.resolve().relative_to(ROOT).as_posix() if file.resolve().is_relative_to(ROOT) else file.as_posix()
            )
            if file.suffix in PROSE and not any(part in name for part in HISTORY):
                yield file


def main() -> int:
    """Run as described above; exits with 1 if a rule is broken."""
    given = [Path(path) for path in sys.argv[1:]] or [ROOT / place for place in PLACES if (ROOT / place).exists()]
    count = 0
    for file in files(given):
        text = file.read_text(encoding="utf-8")
        for prose in PROSE[file.suffix](text):
            for finding in check(prose, file.suffix == ".md"):
                print(f"{file}:{finding.line}: {finding.what}")
                count += 1
    if count:
        print(f"{count} findings; the rules are in CONTRIBUTING.md", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
