"""The needle: both exact prompts, the grid, lengths, scores."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from fake_reader import FakeReader, ask
from tersekv.errors import UserError
from tersekv.lab.evals.tasks.needle import CITIES, EATEN, Needle, minference

NEEDLE = "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n"
ESSAY = "One. Two words. Then three words here. "


@pytest.fixture
def essay(tmp_path: Path) -> str:
    (tmp_path / "essay.txt").write_text(ESSAY * 200)
    return str(tmp_path / "essay.txt")


def prompts(task: Needle, reader: FakeReader) -> list[Any]:
    return [sample.data.prompt for sample in task.instances(reader)]


def test_fu_to_the_letter(essay: str) -> None:
    (prompt,) = prompts(Needle(lengths="300", depths="0", text=essay, chat=False), FakeReader())
    text = prompt.context + prompt.question
    head = f"<|im_start|> This is a very long story book: <book> {NEEDLE}One. Two words. Then three"
    assert text.startswith(head)
    assert text.endswith(
        " </book>.\n Based on the content of the book, Question: What is the best thing to do in San Francisco?\n"
        "Answer:"
    )
    assert (prompt.chat, prompt.answer_start) == (False, "")


def test_fu_in_a_chat(essay: str) -> None:
    plain, chat = (prompts(Needle(lengths="300", depths="50", text=essay, chat=c), FakeReader())[0] for c in (0, 1))
    assert chat.chat
    assert chat.answer_start == "Answer:"
    assert chat.question + "\nAnswer:" == plain.question
    assert "<|im_start|>" not in chat.context
    assert chat.context.endswith(" </book>.\n")


def test_minference_to_the_letter(essay: str) -> None:
    task = Needle(lengths="300", depths="100", protocol="minference", text=essay, chat=False)
    (sample,) = task.instances(FakeReader())
    number = sample.data.expected[0]
    assert len(number) == 7
    text = sample.data.prompt.context + sample.data.prompt.question
    city = text.split("\nThe special magic ")[1].split(" number is: ")[0]
    assert city in CITIES.split(",")
    assert text.startswith(
        "Write a high-quality answer for the given question using only the provided search results (some of which "
        "might be irrelevant).\nOne. Two words."
    )
    assert text.endswith(
        f"\nThe special magic {city} number is: {number}\n\n\nQuestion: What is the special magic {city} number? "
        "Don't give information outside the document or repeat your findings. Keep your response short and direct. "
        "Answer:"
    )
    assert minference(Random(0)) != minference(Random(1))


@pytest.mark.parametrize("protocol", ["fu", "minference"])
@pytest.mark.parametrize("chat", [True, False])
def test_lengths_and_depths(protocol: str, chat: bool, essay: str) -> None:
    reader = FakeReader()
    task = Needle(lengths="400,1k", depths="0,40,100", protocol=protocol, chat=chat, samples=2, seed=3, text=essay)
    samples = task.instances(reader)
    assert [s.id for s in samples][:3] == ["400-0-0", "400-0-1", "400-40-0"]
    for sample in samples:
        case, length = sample.data, sample.data.cell["length"]
        tokens = reader.tokens_of(case.prompt) + case.new_tokens
        assert length - 201 < tokens <= length
        haystack = "\n".join(case.prompt.context.split(" <book> " if protocol == "fu" else "irrelevant).\n")[1:])
        before, after = haystack.split("\nThe best thing" if protocol == "fu" else "\nThe special magic")
        depth = 100 * len(before) / (len(before) + len(after))
        assert depth == pytest.approx(case.cell["depth"], abs=15)
        assert not before or before.endswith(".") or case.cell["depth"] == 100


def test_samples_read_other_parts_of_the_text() -> None:
    one, two = prompts(Needle(lengths="500", depths="100", samples=2), FakeReader())
    (again,) = prompts(Needle(lengths="500", depths="100"), FakeReader())
    assert one == again
    assert one.context[:200] != two.context[:200]


def test_scores() -> None:
    task = Needle(lengths="300", depths="0")
    perfect = FakeReader(lambda *_: f" {EATEN[0].upper()}{EATEN[1:]}")
    assert ask(task, perfect) == [{"accuracy": 1, "recall": 11 / 12, "gold_nll": 0.5}]
    assert perfect.asked[0][1:3] == (50, f" {EATEN}")
    wrong = FakeReader(lambda *_: "sit in a park")
    assert ask(task, wrong) == [{"accuracy": 0, "recall": 4 / 12, "gold_nll": 0.5}]
    magic = Needle(lengths="300", depths="0", protocol="minference")
    assert ask(magic, FakeReader(lambda _, gold: f"it is {gold}!")) == [{"accuracy": 1, "gold_nll": 0.5}]
    assert ask(magic, wrong)[0]["accuracy"] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"depths": "0,101"}, "write whole numbers from 0 to 100"),
        ({"lengths": "0"}, "is not a number of tokens"),
        ({"protocol": "kamradt"}, "choose fu or minference"),
        ({"samples": 0}, "samples=0 is not allowed"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Needle(**options)


def test_impossible_lengths() -> None:
    with pytest.raises(UserError, match="needle does not fit into 200 tokens"):
        Needle(lengths="200").instances(FakeReader())
    with pytest.raises(UserError, match=r"cannot read the text 'nowhere\.txt'"):
        Needle(text="nowhere.txt").instances(FakeReader())
