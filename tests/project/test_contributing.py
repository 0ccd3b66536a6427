"""CONTRIBUTING.md's steps for a codec, executed: one new file is sufficient."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import tersekv
import test_codecs
from conftest import prompt
from tersekv import codecs

ROOT = Path(__file__).resolve().parents[2]

CODEC = '''
"""Ternary codes per token: x̂ = scale·{−1, 0, 1}, scale the mean magnitude of a group (an example, from no paper)."""

from dataclasses import dataclass

import torch

from tersekv.codecs.base import Codec, Method, TableBytes, check_range, for_both_sides
from tersekv.layouts.grid import Grid, GridView, nearest_code, round_scale

TABLE = torch.tensor([-1.5, 0.0, 1.5, 3.0])


@dataclass(frozen=True)
class Ternary(Codec):
    """group: channels per scale."""

    group: int = 32

    def __post_init__(self):
        check_range("group", self.group, 1, 256)

    def layout(self, head_dim):
        return self.grid(head_dim).layout()

    def grid(self, head_dim):
        return Grid(2, self.side, "token", self.group, False, head_dim)

    def encode(self, x):
        groups = self.grid(x.shape[-1]).groups(x)
        scale = round_scale(groups.abs().mean(-1), torch.float16, "a scale")
        step = scale.float().unsqueeze(-1)
        codes = nearest_code(groups / torch.where(step == 0, 1.0, step), TABLE[:3])
        return self.grid(x.shape[-1]).pack(codes, scale, None)

    def view(self, planes, head_dim):
        return GridView(self.grid(head_dim), planes, TABLE)

    def table_bytes(self, head_dim):
        return TableBytes({"ternary": 16})

    def tables(self, head_dim):
        return [TABLE]


METHOD = Method("ternary", "example", for_both_sides(Ternary))
'''


@pytest.fixture
def ternary(tmp_path, monkeypatch):
    """Write the file into a folder that is part of the package during a test."""
    (tmp_path / "ternary.py").write_text(CODEC)
    monkeypatch.setattr(codecs, "__path__", [*codecs.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    codecs.methods.cache_clear()
    yield "ternary"
    codecs.methods.cache_clear()
    sys.modules.pop("tersekv.codecs.ternary", None)


def test_steps_are_numbered():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for title in ("codec", "format", "kernel", "token policy", "evaluation"):
        section = re.split(rf"## Add an? {title}", text)[1].split("## ", 1)[0]
        numbers = [int(n) for n in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= 3


def test_a_new_file_is_a_method(ternary):
    assert ternary in codecs.methods()
    assert str(tersekv.Recipe.parse("ternary:group=16")) == "ternary:group=16"
    with pytest.raises(tersekv.UserError, match="group=0 is out of range"):
        tersekv.Recipe.parse("ternary:group=0")


def test_it_passes_conformance(ternary):
    for D in test_codecs.HEAD_DIMS:
        test_codecs.test_bytes_held_are_bits_declared(ternary, D)
    for kind in ("zeros", "constant", "huge", "outlier channels", "normal"):
        test_codecs.test_finite_on_extremes(ternary, kind)
    test_codecs.test_every_method_states_what_it_is(ternary)
    test_codecs.test_blocks_do_not_depend_on_each_other(ternary)
    test_codecs.test_rows_do_not_depend_on_the_batch(ternary)
    test_codecs.test_scores_are_products_with_the_decoded(ternary)


def test_it_runs_in_a_model(ternary, llama):
    recipe = "window:recent=16+ternary"
    with tersekv.compress(llama, recipe), torch.no_grad():
        cache = tersekv.CompressedCache(llama.config, recipe)
        logits = llama(prompt(200), past_key_values=cache).logits
    assert torch.isfinite(logits).all()
    assert cache.footprint().parts["codes"] > 0
    assert cache.footprint().parts["tables"] == 16
