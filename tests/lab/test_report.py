"""`tersekv report`: one complete page that fetches nothing, escapes texts of records, and is
reproducible."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from made_records import DAMAGE, evaluation
from made_records import results as results
from tersekv import cli
from tersekv.lab.plots.page import page
from test_cli import refuse, run_json

VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects ids, links, images and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.pictures: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert tag not in ("script", "iframe", "object")
        if tag not in VOID:
            self.open.append(tag)
        self.ids += [str(found["id"])] if "id" in found else []
        self.links += [str(found[name]) for name in ("href", "src") if name in found]
        self.pictures += [found] if tag == "img" else []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_report_is_one_complete_page(results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    made = run_json(capfd, "report", str(results), "--out", str(out))
    assert made == {"report": str(out), "records": len(evaluation()), "bytes": out.stat().st_size}
    text = out.read_text(encoding="utf-8")
    found = Page(text)
    assert found.ids[0] == "pareto"
    assert len(set(found.ids)) == len(found.ids)
    inside = {link for link in found.links if link.startswith("#")}
    assert inside == {f"#{anchor}" for anchor in found.ids}
    assert all(link.startswith(("#", "data:")) for link in found.links)
    assert len(found.pictures) == 3
    assert all(len(str(picture["alt"])) > 60 for picture in found.pictures)
    said = "\n".join(found.texts)
    assert "prefers-color-scheme: dark" in said
    for recipe in DAMAGE:
        assert recipe in said
    assert "tersekv eval perplexity --model tiny --recipe turboquant:bits=2" in said
    assert cli.run(["report", str(results), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == text


def test_report_escapes_texts_of_records(tmp_path: Path) -> None:
    records = [r for r in evaluation(model='<script>alert("&")</script>') if r["recipe"] in ("full", "kivi:bits=2")]
    text = page(records, "<b>", "'&'")
    assert "<script" not in text
    assert any("<script>" in said for said in Page(text).texts)


def test_report_of_the_full_cache_alone(tmp_path: Path) -> None:
    found = Page(page([r for r in evaluation() if r["recipe"] == "full"], "r", "o.html"))
    assert "The records hold no packed recipe to compare." in found.texts
    assert [p["alt"] for p in found.pictures if "Stacked" in str(p["alt"])] == []


def test_report_refuses(tmp_path: Path, results: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "holds no records.jsonl" in refuse(capfd, "report", str(tmp_path), "-o", str(tmp_path / "r.html"))
    assert "ends in '.png'" in refuse(capfd, "report", str(results), "-o", str(tmp_path / "r.png"))
