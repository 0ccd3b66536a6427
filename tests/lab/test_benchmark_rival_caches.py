"""The benchmark of other packages' caches: their table, a missing package, failures, and bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from conftest import benchmark, build
from tersekv.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load benchmarks/three_models.py, which imports its neighbour."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return benchmark("three_models")


@pytest.fixture
def caches(driver: ModuleType) -> ModuleType:
    """Return the module of other packages' caches that the driver uses."""
    return sys.modules["rival_caches"]


class Exact:
    """Stands for a codec that loses nothing: codes are the vectors, and norms are ones."""

    bytes_per_k_vector = bytes_per_v_vector = 1

    def compress_k(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vectors.clone(), torch.ones(vectors.shape[:-1])

    def decompress_k(self, codes: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        return codes * norms[..., None]

    compress_v, decompress_v = compress_k, decompress_k


def test_a_missing_package_is_named(caches: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = caches.RIVALS["turboquant"]._replace(module="no_such_module")
    monkeypatch.setitem(caches.RIVALS, "turboquant", gone)
    with pytest.raises(UserError, match=r"no_such_module.*: pip install turboquant==0\.2\.0$"):
        caches.needed("turboquant")


@torch.no_grad()
def test_a_failure_is_recorded(driver: ModuleType, caches: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("heads are too wide. Use others.\nMore.")

    monkeypatch.setitem(caches.RIVALS, "turboquant", caches.Rival("torch", "1", "torch", fail))
    one_pass = driver.Pass(build("llama"), torch.randint(97, (1, 264)), [8])
    found = one_pass.scores("turboquant", 8)
    assert found["failed"] == "ValueError: heads are too wide. Use others."
    assert driver.mean([found]) == found


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_hold_codes_alone(caches: ModuleType, name: str) -> None:
    model, ids = build(name), torch.randint(97, (1, 160))
    exact, coded = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for layer in coded.layers:
        caches.hold_codes(layer, Exact())
    model(ids[:, :60], past_key_values=exact)
    model(ids[:, :60], past_key_values=coded)
    expected, found = (caches.through(cache, model, ids[:, 60:]) for cache in (exact, coded))
    torch.testing.assert_close(found, expected)
    assert [layer.keys.shape for layer in coded.layers] == [layer.keys.shape for layer in exact.layers]


def test_shared_storage_is_counted_once(caches: ModuleType) -> None:
    whole = torch.zeros(8, 4)
    assert caches.held({"part": whole[2:3], "all": [whole], "other": (torch.zeros(3, dtype=torch.uint8), 7)}) == 131


def test_the_table_shows_failures_and_counted_bits(driver: ModuleType, caches: ModuleType) -> None:
    cell = {name: {"bits": 4.0, "kl": 0.5, "versions": "1.0"} for name in (*driver.RECIPES, *caches.RIVALS)}
    cell["tri-tier"] |= {"counted": 3.25}
    cell["hqq"] = {"failed": "ValueError: too wide. Use others.", "versions": "1.0"}
    cells = [{"model": "a/b", "text": "t", "tokens": 8} | cell, {"model": "a/c", "text": "t", "tokens": 8}]
    lines = driver.of_rivals(cells).splitlines()
    assert lines[0] == "| cache | a/b |"
    assert lines[2] == "| `default` | 4.00 bits, 0.5000 |"
    assert "| hqq 1.0 | – |" in lines
    assert "| tri-tier 1.0 | 4.00 bits (counts 3.25), 0.5000 |" in lines
    assert lines[-1] == "- hqq 1.0 fails on a/b: ValueError: too wide."
