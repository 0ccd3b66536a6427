"""Check that a commit changed words only.

    python tools/prose_only.py [OLD [NEW]]      # revisions; NEW left out: the working tree; OLD: HEAD

Compares every Python and C++ file of two revisions. Python files must have equal syntax trees when docstrings and other
string statements are left out. C++ files must be equal when comments are left out. Prints the files that differ and
exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

CPP = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')', re.DOTALL)
"""Comments of C++, or a literal (group 1), in which no comment begins."""


def git(*args: str) -> str:
    """Standard output of a git command."""
    return subprocess.run(["git", *args], check=True, capture_output=True, text=True).stdout


def python_code(text: str) -> str:
    """The syntax tree without strings that stand alone."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                block[:] = [
                    child
                    for child in block
                    if not (
                        isinstance(child, ast.Expr)
                        and isinstance(child.value, ast.Constant)
                        and isinstance(child.value.value, str)
                    )
                ]
    return ast.dump(tree)


def cpp_code(text: str) -> str:
    """The text without comments and white space; clang-format wraps code by itself."""
    return re.sub(r"\s+", "", CPP.sub(lambda found: found.group(1) or " ", text))


CODE = {".py": python_code, ".h": cpp_code, ".cpp": cpp_code}


def main() -> int:
    """Run as described above."""
    old = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    new = sys.argv[2] if len(sys.argv) > 2 else None
    changed = git("diff", "--name-status", "--no-renames", old, *([new] if new else [])).splitlines()
    differ = []
    for status, name in (line.split("\t") for line in changed):
        code = CODE.get(Path(name).suffix)
        if code is None:
            continue
        if status != "M":
            differ.append(f"{name} ({status})")
            continue
        now = git("show", f"{new}:{name}") if new else Path(name).read_text()
        if code(git("show", f"{old}:{name}")) != code(now):
            differ.append(name)
    for name in differ:
        print(f"more than words: {name}")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
