"""The tables of `benchmarks/serving.py`, from synthetic records."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest

from conftest import benchmark

RECORDS = [
    {"engine": "vllm", "recipe": "full", "new_tokens": 3, "answers": [[1, 2, 3], [4, 5, 6]], "tokens_in_1_gib": 100},
    {"engine": "vllm", "recipe": "int4", "new_tokens": 3, "answers": [[1, 2, 3], [4, 9, 6]], "tokens_in_1_gib": 350},
    {"engine": "transformers", "recipe": "full", "new_tokens": 3, "answers": [[1, 2, 9], [9, 5, 6]]},
    {"engine": "transformers", "recipe": "int4", "new_tokens": 3, "answers": [[1, 9, 9], [9, 5, 6]]},
]


@pytest.fixture(scope="module")
def serving() -> ModuleType:
    """Load benchmarks/serving.py."""
    return benchmark("serving")


def test_each_engine_is_compared_with_its_own_full_cache(serving):
    lines = serving.rows(RECORDS)
    assert "| `int4` | 350 | 3.50 |" in lines
    assert "| vllm | `int4` | vllm, `full` | 1 of 2 | 2.0 ± 1.0 of 3 | 2 |" in lines
    assert "| transformers | `int4` | transformers, `full` | 1 of 2 | 2.0 ± 1.0 of 3 | 2 |" in lines
    assert "| transformers | `full` | vllm, `full` | 0 of 2 | 1.0 ± 1.0 of 3 | 1 |" in lines


def test_tables_are_written_between_their_markers(serving, tmp_path, monkeypatch):
    records, page = tmp_path / "records.jsonl", tmp_path / "page.md"
    records.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    monkeypatch.setattr(sys, "argv", ["serving.py", "table", str(records), "--into", str(page)])
    page.write_text("no place\n")
    with pytest.raises(SystemExit, match="has no place for the tables"):
        serving.main()
    page.write_text(f"before\n{serving.BEGIN}\nold\n{serving.END}\nafter\n")
    serving.main()
    assert page.read_text().startswith(f"before\n{serving.BEGIN}\n| cache in vLLM |")
    assert page.read_text().endswith(f"|\n{serving.END}\nafter\n")
    assert "old" not in page.read_text()
