"""Line retrieval: exact prompts, LongEval's cases, scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import data_folder
from fake_reader import FakeReader, ask
from tersekv.errors import UserError
from tersekv.lab.evals.tasks.lines import HEADER, Lines, build

LONGEVAL = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding <REGISTER_CONTENT> of "
    "a certain line index. Now the record start:\n\n"
    "line torpid-kid: REGISTER_CONTENT is <24169>\n"
    "line big-dog: REGISTER_CONTENT is <7>\n"
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line big-dog? I need the number."
)


def test_longeval_to_the_letter() -> None:
    case = build("longeval", {"torpid-kid": 24169, "big-dog": 7}, "big-dog", "id")
    assert case.prompt.context + case.prompt.question == LONGEVAL
    assert case.prompt.context.endswith("<7>\n")
    assert (case.expected, case.new_tokens, case.prompt.answer_start) == (("7",), 100, "")
    assert case.prompt.chat


def test_pairs() -> None:
    case = build("pairs", {"torpid-kid": 24169, "big-dog": 7}, "big-dog", "id")
    assert case.prompt.context.endswith("\ntorpid-kid: 24169\nbig-dog: 7\n")
    assert case.prompt.question.endswith("big-dog?")
    assert case.prompt.answer_start == "big-dog:"
    assert case.gold == " 7"


@pytest.mark.parametrize(
    ("variant", "answer", "right"),
    [
        ("longeval", "The <REGISTER_CONTENT> in line 5-a is <{}>.", 1),
        ("longeval", "{} is not 5", 0),
        ("pairs", " {}\nother: 5", 1),
        ("pairs", " 5 {}", 0),
        ("pairs", "", 0),
    ],
)
def test_which_number_counts(variant: str, answer: str, right: int) -> None:
    reader = FakeReader(lambda _, gold: answer.format(gold))
    assert [m["accuracy"] for m in ask(Lines(samples=2, lines="3", variant=variant), reader)] == [right, right]


def test_generated_lines() -> None:
    reader = FakeReader()
    samples = Lines(samples=20, lines="7,3").instances(reader)
    assert samples == Lines(samples=20, lines="7,3").instances(reader)
    assert samples != Lines(samples=20, lines="7,3", seed=1).instances(reader)
    assert [s.id for s in samples[19:21]] == ["7-19", "3-0"]
    for sample in samples:
        lines = sample.data.prompt.context.removeprefix(HEADER).splitlines()
        assert len(lines) == len({line.split(":")[0] for line in lines}) == sample.data.cell["lines"]
    assert {s.data.cell["depth"] for s in samples[20:]} == {0, 50, 100}


def shipped(folder: Path, lines: int) -> None:
    rows = [f"line name-{i}: REGISTER_CONTENT is <{1000 + i}>\n" for i in range(lines)]
    prompt = HEADER + "".join(rows) + "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line name-2?"
    case = {"random_idx": ["name-2", 2], "expected_number": 1002, "num_lines": lines, "prompt": prompt}
    (folder / f"{lines}_lines.jsonl").write_text(json.dumps(case) + "\n")


def test_shipped_cases_are_subsampled(tmp_path: Path) -> None:
    shipped(tmp_path, 10)
    shipped(tmp_path, 30)
    samples = Lines(samples=3, lines="1,4,20,30", data=str(tmp_path)).instances(FakeReader())
    for sample in samples:
        text = sample.data.prompt.context
        assert sample.data.expected == ("1002",)
        assert "line name-2: REGISTER_CONTENT is <1002>\n" in text
        numbers = [int(line.split("<")[1].strip(">")) for line in text.removeprefix(HEADER).splitlines()]
        assert numbers == sorted(numbers)
        assert len(numbers) == sample.data.cell["lines"]
    assert "name-29" not in samples[3].data.prompt.context  # the smaller file was sufficient
    with pytest.raises(UserError, match="no cases of 31 lines or more"):
        Lines(lines="31", data=str(tmp_path)).instances(FakeReader())
    with pytest.raises(UserError, match="takes names from word lists"):
        Lines(variant="pairs", data=str(tmp_path)).instances(FakeReader())


@pytest.mark.parametrize("lines", [5, None])
def test_shipped_files_in_another_layout(lines: int | None, tmp_path: Path) -> None:
    """With fewer lines than the name says, without the target, in other JSON, or none."""
    file, said = tmp_path / "20_lines.jsonl", "20_lines.jsonl is not in LongEval's layout .*download it again"
    (tmp_path / "2x_lines.jsonl").write_text("another file")
    if lines:
        shipped(tmp_path, lines)
        whole = (tmp_path / f"{lines}_lines.jsonl").read_text()
    for content in [whole, whole.replace('"name-2"', '"name-9"')] if lines else ["", "no JSON", "[]", "{}", '"a"']:
        file.write_text(content)
        with pytest.raises(UserError, match=said):
            Lines(samples=1, lines="10", data=str(tmp_path)).instances(FakeReader())


def test_longevals_own_cases() -> None:
    folder = data_folder()
    if folder is None or not (folder / "longeval" / "200_lines.jsonl").is_file():
        pytest.skip("LongEval's cases are not next to the checkout")
    (sample,) = Lines(samples=1, lines="200", data=str(folder / "longeval")).instances(FakeReader())
    case = json.loads((folder / "longeval" / "200_lines.jsonl").read_text().splitlines()[0])
    assert sample.data.prompt.context + sample.data.prompt.question + " " == case["prompt"]
    assert sample.data.expected == (str(case["expected_number"]),)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lines": "0"}, "write whole numbers from 1"),
        ({"lines": "1k"}, "write whole numbers from 1"),
        ({"variant": "pair"}, "did you mean 'pairs'"),
        ({"seed": 1, "samples": -1}, "samples=-1 is not allowed"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Lines(**options)


def test_too_many_lines() -> None:
    with pytest.raises(UserError, match="sample 500-0 has"):
        Lines(lines="500").instances(FakeReader(context=2048))
