"""The tables of `benchmarks/serving.py`, from synthetic records."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from conftest import benchmark
from tersekv.lab.evals import runs

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
    made = serving.tables(RECORDS)
    assert list(made) == ["capacity", "agreement"]
    assert "| `int4` | 350 | 3.50 |" in made["capacity"].splitlines()
    lines = made["agreement"].splitlines()
    assert "| vllm | `int4` | vllm, `full` | 1 of 2 | 2.0 ± 1.0 of 3 | 2 |" in lines
    assert "| transformers | `int4` | transformers, `full` | 1 of 2 | 2.0 ± 1.0 of 3 | 2 |" in lines
    assert "| transformers | `full` | vllm, `full` | 0 of 2 | 1.0 ± 1.0 of 3 | 1 |" in lines


def test_divergences_are_a_table_of_their_own(serving):
    record = {"engine": "vllm", "kl": {"int4": [[0.1, 0.9], [0.3, 1.0]]}}
    made = serving.tables([*RECORDS, record])
    assert made["divergence"].splitlines()[-1] == "| `int4` | 0.2000 ± 0.1000 | 95.0% |"
    assert {name: made[name] for name in ("capacity", "agreement")} == serving.tables(RECORDS)


def test_tables_of_files_are_printed(serving, tmp_path, monkeypatch, capsys):
    records = tmp_path / "records.jsonl"
    records.write_text("".join(runs.written(RECORDS, ("engine",))))
    monkeypatch.setattr(sys, "argv", ["serving.py", "table", str(records)])
    serving.main()
    assert capsys.readouterr().out.startswith("| cache in vLLM |")


def test_speeds_are_compared_within_a_round():
    times = {"full": [[2.0, 0.1], [4.0, 0.2]], "int4": [[1.0, 0.2], [2.0, 0.4]]}
    lines = benchmark("serving").speed_table([{"model": "tiny", "shape": [8, 4000, 9], "seconds": times}])
    assert "| tiny | 8 x 4,000 x 9 | `full` | 3.00 | 150.0 | 1.00x | 1.00x |" in lines
    assert "| 8 x 4,000 x 9 | `int4` | 1.50 | 300.0 | 2.00x | 0.50x |" in lines


def test_latencies_of_a_load():
    record = {"recipe": "int4", "pages": 9, "done": 20, "seconds": 10.0, "preemptions": 2.0, "whole": 20}
    record |= {"first": [float(i) for i in range(20)], "each": [0.1] * 20, "requests": 5, "prompt": 1500, "new": 32}
    found = "| `int4` | 2.00 | 2 | 9.5 / 18.9 | 100 / 100 | 20 of 20 |"
    for turns, said in ((0, ""), (4, ", 4 turns")):
        made = benchmark("serving_server").load_table([record | {"turns": turns}])
        assert made.splitlines()[-1] == f"| 5 x 1,500 + 32{said} {found}"
