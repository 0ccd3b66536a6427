"""Rules for every task in the folder. A new task is tested automatically."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fake_reader import FakeReader
from tersekv.lab.evals.cases import Case
from tersekv.lab.evals.options import build
from tersekv.lab.evals.tasks import Task, tasks

TINY: dict[str, dict[str, Any]] = {
    "passkey": {"samples": 2, "lengths": "200"},
    "lines": {"samples": 2, "lines": "3"},
    "needle": {"lengths": "400", "depths": "0,100"},
    "ruler": {"samples": 2, "lengths": "500"},
    "longbench": {"samples": 2, "subtasks": "trec,hotpotqa", "length": "500"},
    "perplexity": {"context": 64, "windows": 2},
    "divergence": {"context": 64, "windows": 2},
}
LIGHT = ("passkey", "lines", "needle", "ruler", "longbench")


@pytest.fixture(params=sorted(tasks()))
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    """Return each task with settings that make it small."""
    options = dict(TINY.get(request.param, {}))
    if request.param == "longbench":
        row = {"input": "Type:", "context": "word " * 20, "answers": ["Food"], "all_classes": ["Food", "Date"]}
        for name in ("trec", "hotpotqa"):
            (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps({**row, '_id': 1})}\n{json.dumps(row)}\n")
        options["data"] = str(tmp_path)
    return tasks()[request.param](**options)


def test_runs_from_end_to_end(task: Task) -> None:
    full, packed = FakeReader(), FakeReader(lambda *_: "7, or Paragraph 7")
    samples = task.instances(full)
    assert samples
    assert len({sample.id for sample in samples}) == len(samples)
    assert [s.id for s in samples] == [s.id for s in task.instances(full)]
    results = {}
    for reader in (full, packed):
        results[reader] = [task.evaluate(sample, reader, full) for sample in samples]
        for result in results[reader]:
            assert all(math.isfinite(value) for value in result.metrics.values())
            assert 0 < result.tokens <= reader.context_tokens
            json.dumps(result.details)
    metrics = {reader: [result.metrics for result in found] for reader, found in results.items()}
    for reader in (full, packed):
        summary = task.summarise(metrics[reader], metrics[full])
        assert summary
        assert all(math.isfinite(estimate.mean) for estimate in summary.values())


def test_cases_are_fair(task: Task) -> None:
    """The question is not packed, no prompt ends with a space, correct answers score and others do
    not."""
    cases = [sample.data for sample in task.instances(FakeReader()) if isinstance(sample.data, Case)]
    for case in cases:
        prompt = case.prompt
        assert prompt.context
        assert prompt.question
        assert not (prompt.context + prompt.question + prompt.answer_start).endswith(" ")
        for text, accuracy in ((", ".join(case.expected), 1), ("", 0)):
            metrics = task.score(case, text)  # type: ignore[attr-defined]
            assert metrics["accuracy"] == accuracy
            assert all(0 <= value <= 1 for value in metrics.values())


@pytest.mark.parametrize("name", sorted(tasks()))
def test_options_are_plain(name: str) -> None:
    """The program parses them from text, and the defaults make a valid task."""
    assert build([name], {}) == {name: tasks()[name]()}
    for field in dataclasses.fields(tasks()[name]()):
        assert isinstance(getattr(tasks()[name](), field.name), (str, int, float, bool, tuple)), field.name


@pytest.mark.parametrize("name", sorted(tasks()))
def test_docstrings_open_with_a_sample(name: str) -> None:
    doc = sys.modules[tasks()[name].__module__].__doc__ or ""
    assert "\n    " in doc[:400], "an example, indented, near the beginning"
    assert "Source: " in doc or name not in LIGHT


def test_question_tasks_import_no_torch() -> None:
    names = ", ".join(f"tersekv.lab.evals.tasks.{name}" for name in LIGHT)
    code = f"import sys, {names}; print([m for m in sys.modules if m in ('torch', 'transformers')])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert out.stdout.strip() == "[]"
