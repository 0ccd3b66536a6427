"""Check that a tag, the CHANGELOG and the package agree on the version: `check_release.py v0.1.0`.

The release workflow runs it before anything is built. Without a tag it checks the CHANGELOG alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def package_version() -> str:
    """Return the version in src/tersekv/__init__.py, its only place."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "src/tersekv/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def newest_entry() -> str:
    """Return the heading of the CHANGELOG's first release, for example "0.1.0 (unreleased)"."""
    found = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found is not None
    return found[1].strip()


def mistakes(tag: str | None) -> list[str]:
    """Return one sentence for each disagreement."""
    version, entry = package_version(), newest_entry()
    found = []
    if entry.split()[0] != version:
        found.append(f"the package is {version} and the first entry of CHANGELOG.md is {entry}")
    if tag is not None and tag != f"v{version}":
        found.append(f"the package is {version} and the tag is {tag}, not v{version}")
    if tag is not None and "unreleased" in entry:
        found.append(f"CHANGELOG.md still says {entry}: put the date of the release there")
    return found


if __name__ == "__main__":
    found = mistakes(sys.argv[1] if len(sys.argv) > 1 else None)
    print("\n".join(found) or f"version {package_version()} agrees")
    sys.exit(bool(found))
