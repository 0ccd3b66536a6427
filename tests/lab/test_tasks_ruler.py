"""RULER as a task: lengths, scores, and impossible requests."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fake_reader import FakeReader, ask
from fake_reader import questions as questions
from tersekv.errors import UserError
from tersekv.lab.evals.ruler_lists import common_words
from tersekv.lab.evals.tasks.ruler import SUBTASKS, Ruler
from tersekv.lab.evals.words import FILES, word_lists


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_lengths(subtask: str, questions: str) -> None:
    reader = FakeReader()
    task = Ruler(samples=2, lengths="1500,2k", subtasks=subtask, data=questions)
    samples = task.instances(reader)
    assert samples == task.instances(reader)
    assert samples != Ruler(samples=2, lengths="1500,2k", subtasks=subtask, data=questions, seed=1).instances(reader)
    assert [s.id for s in samples] == [f"{subtask}-{length}-{i}" for length in (1500, 2048) for i in range(2)]
    for sample in samples:
        tokens = reader.tokens_of(sample.data.prompt) + sample.data.new_tokens
        assert tokens <= sample.data.cell["length"]
        if not subtask.startswith("qa"):  # the number of documents is limited
            assert tokens > sample.data.cell["length"] - 60


def test_scores(questions: str) -> None:
    def half(prompt: Any, gold: str | None) -> str:
        """Answer with the first of several values, or the single correct answer in capitals."""
        return gold.upper() if gold else re.search(r"is: (\d+)", prompt.context)[1]  # type: ignore[index]

    task = Ruler(samples=2, lengths="2k", subtasks="niah_multivalue,qa_1", data=questions)
    reader = FakeReader(half)
    metrics = ask(task, reader)
    assert metrics[0] == {"accuracy": 0.25, "accuracy_niah_multivalue": 0.25}
    assert metrics[2] == {"accuracy": 1, "accuracy_qa_1": 1, "gold_nll": 0.5}
    summary = task.summarise([*metrics, metrics[2]], [])
    assert summary["accuracy"].mean == (0.25 + 1) / 2  # over subtasks, not samples
    assert summary["accuracy_niah_multivalue"].mean == 0.25
    assert summary["gold_nll"].mean == 0.5
    assert [asked[1] for asked in reader.asked] == [128, 128, 32, 32]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subtasks": "niah_single"}, "did you mean 'niah_single_"),
        ({"subtasks": ""}, "subtasks '' is not known"),
        ({"lengths": "-1"}, "is not a number of tokens"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Ruler(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"subtasks": "qa_1"}, "qa_1 needs questions: give a folder with squad.json or xquad.en.json as data"),
        ({"subtasks": "all", "data": "nowhere"}, "qa_1 needs squad.json or xquad.en.json, and data 'nowhere' has none"),
        ({"subtasks": "cwe", "lengths": "500"}, "cwe does not fit into 500 tokens"),
        ({"subtasks": "vt", "lengths": "9k"}, "exceeds this model's context"),
    ],
)
def test_impossible_requests(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Ruler(**{"samples": 1, "lengths": "2k", **options}).instances(FakeReader())


def test_common_words_up_to_all_words(tmp_path: Path) -> None:
    """A length is refused only if another word would fit, though the search tries sizes beyond the right one."""
    for name, start in zip(FILES, (0, 100, 200), strict=True):
        (tmp_path / name).write_text("\n".join(f"w{i}" for i in range(start, start + 100)))
    reader, task = FakeReader(context=1 << 17), Ruler(samples=1, subtasks="cwe", data=str(tmp_path))
    words = word_lists(str(tmp_path))
    whole = common_words(300, 4096, Random(0), words).tokens(reader)
    assert whole > 4096
    (case,) = dataclasses.replace(task, lengths=str(whole)).cases(reader)
    assert whole - 60 < case.tokens(reader) <= whole
    with pytest.raises(UserError, match="cwe needs more than the 300 available words"):
        list(dataclasses.replace(task, lengths=str(whole + 60)).cases(reader))
    for name in FILES:
        (tmp_path / name).write_text("one")
    word_lists.cache_clear()
    with pytest.raises(UserError, match="cwe needs more than the 1 available words"):
        list(dataclasses.replace(task, lengths="2k").cases(reader))


def test_too_few_words_or_questions(questions: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cwe needs more than the"):
        Ruler(samples=1, lengths="64k", subtasks="cwe").instances(FakeReader(context=1 << 17))
    with pytest.raises(UserError, match="qa_2 has 3 questions"):
        Ruler(samples=4, lengths="2k", subtasks="qa_2", data=questions).instances(FakeReader())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "hotpotqa.json").write_text("[]")
    with pytest.raises(UserError, match=r"hotpotqa\.json has no questions"):
        Ruler(samples=1, lengths="2k", subtasks="qa_2", data=str(tmp_path / "empty")).instances(FakeReader())
