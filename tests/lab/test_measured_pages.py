"""docs/measured: its files are what the records give, and all records are shown."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from conftest import benchmark

UNUSED = {"every_task.jsonl"}
"""Records of single samples, which show that nothing fails, and of an earlier version."""


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """Load benchmarks/pages.py."""
    return benchmark("pages")


@pytest.fixture(scope="module")
def made(pages: ModuleType) -> dict[str, str]:
    """Return all files as the records give them."""
    return pages.files()


def test_committed_files_are_those_of_the_records(pages: ModuleType, made: dict[str, str]) -> None:
    assert pages.wrong(made) == [], "run python benchmarks/pages.py"


def test_changed_missing_and_other_files_are_named(pages: ModuleType, tmp_path: Path) -> None:
    for name, text in {"same.md": "a", "changed.md": "old", "other.md": "a"}.items():
        (tmp_path / name).write_text(text)
    wrong = pages.wrong({"same.md": "a", "changed.md": "new", "missing.md": "a"}, tmp_path)
    assert wrong == ["changed.md", "missing.md", "other.md"]


def test_every_record_is_shown(pages: ModuleType, made: dict[str, str]) -> None:
    folder = pages.recorded.RECORDS
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*.jsonl")} - UNUSED
    shown = set(re.findall(r"`([\w/-]+\.jsonl|trellis/records)`", "".join(made.values())))
    assert {"trellis/records" if name.startswith("trellis/records/") else name for name in held} == shown


def test_each_table_has_rows_and_equal_columns(made: dict[str, str]) -> None:
    for name, text in made.items():
        for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            first, rule, *rows = lines.splitlines()
            assert rows, f"{name}: {first} has no rows"
            assert {line.count(" | ") for line in (first, *rows)} == {rule.count("|") - 2}, f"{name}: {first}"


def test_pictures_are_whole(made: dict[str, str]) -> None:
    drawn = {name: text for name, text in made.items() if name.endswith(".svg")}
    for name, text in drawn.items():
        assert "nan" not in text, name
        picture = ElementTree.fromstring(text)
        assert picture.get("role") == "img"
    shown = set(re.findall(r"\]\((\w+\.svg)\)", "".join(made.values())))
    assert shown == drawn.keys()


def test_labels_avoid_each_other(pages: ModuleType) -> None:
    chart = pages.pictures.Chart("Title", "About.", 100)
    chart.dot(200, 50, "s0")
    chart.label(200, 50, "one")
    chart.label(200, 50, "two")
    (left, top, right, bottom), (x0, y0, x1, y1) = chart.boxes[-2:]
    assert right <= x0 or x1 <= left or bottom <= y0 or y1 <= top
