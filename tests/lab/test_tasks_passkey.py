"""Passkey retrieval: exact prompts, lengths, scores."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from fake_reader import FakeReader, ask
from tersekv.errors import UserError
from tersekv.lab.evals.haystack import NOISE
from tersekv.lab.evals.tasks.passkey import Passkey, build

INTRODUCTION = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there."
)


def parts(variant: str, size: int, seed: int) -> tuple[str, str, str]:
    """Return the text before and after the needle, and the key. Everything else is compared
    exactly."""
    case = build(variant, size, Random(seed), "id", 100)
    key = case.expected[0]
    assert 1 <= int(key) <= 50_000
    assert case.prompt.question == "\nWhat is the pass key? The pass key is"
    assert not case.prompt.chat
    first, before, needle, after = case.prompt.context.split("\n")
    assert first == INTRODUCTION
    assert needle == f"The pass key is {key}. Remember it. {key} is the pass key."
    return before, after, key


def test_pose_repeats_without_a_space() -> None:
    seen = set()
    for seed in range(40):
        before, after, _ = parts("pose", 3, seed)
        assert before + after == NOISE * 3
        assert before == NOISE * (len(before) // len(NOISE))
        seen.add(len(before) // len(NOISE))
    assert seen == {0, 1, 2, 3}


def test_landmark_cuts_by_characters() -> None:
    for seed in range(20):
        before, after, _ = parts("landmark", 300, seed)
        assert len(before) + len(after) == 300
        endless = " ".join([NOISE] * 4)
        assert endless.startswith(before)
        assert endless.startswith(after)
    assert parts("landmark", 0, 0)[:2] == ("", "")


@pytest.mark.parametrize("variant", ["pose", "landmark"])
@pytest.mark.parametrize("length", [100, 555, 1024])
def test_as_long_as_fits(variant: str, length: int) -> None:
    reader = FakeReader()
    task = Passkey(samples=3, lengths=str(length), variant=variant)
    for sample in task.instances(reader):
        tokens = reader.tokens_of(sample.data.prompt) + 10
        assert length - 26 < tokens <= length
        assert sample.data.cell["length"] == length


def test_first_number_counts() -> None:
    task = Passkey(samples=2, lengths="200")
    answers: list[Any] = ["{}.\nThe pass key is 7", " is {}", "7, {}", "none"]
    for answer, right in zip(answers, (1, 1, 0, 0), strict=True):
        reader = FakeReader(lambda _, gold, answer=answer: answer.format(gold))
        assert [m["accuracy"] for m in ask(task, reader)] == [right, right]
    assert [(new, gold) for _, new, gold, _, _ in reader.asked] == [
        (10, f" {s.data.expected[0]}") for s in task.instances(reader)
    ]


def test_seeds() -> None:
    reader = FakeReader()
    one, again = (Passkey(samples=4, lengths="300,200").instances(reader) for _ in range(2))
    assert one == again
    assert [s.id for s in one] == [f"{length}-{i}" for length in (300, 200) for i in range(4)]
    other = Passkey(samples=4, lengths="300,200", seed=1).instances(reader)
    assert [s.data.expected for s in one] != [s.data.expected for s in other]
    fewer = Passkey(samples=2, lengths="200").instances(reader)
    assert fewer == [s for s in one if s.id in ("200-0", "200-1")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 0}, "samples=0 is not allowed; give 1"),
        ({"lengths": "long"}, "lengths 'long' is not a number of tokens"),
        ({"variant": "pos"}, "did you mean 'pose'"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Passkey(**options)


def test_impossible_lengths() -> None:
    with pytest.raises(UserError, match="exceeds this model's context of 8,192"):
        Passkey(lengths="9000").instances(FakeReader())
    with pytest.raises(UserError, match="passkey does not fit into 60 tokens"):
        Passkey(lengths="60").instances(FakeReader())
    with pytest.raises(UserError, match="give a shorter length"):
        replace(Passkey(lengths="100"), samples=1).instances(FakeReader(context=99))


def test_the_reader_packs_when_the_task_says() -> None:
    said = {"before-question": "before the question", "after-prompt": "after the prompt"}
    for pack, words in (said | {"during-prefill": "during prefill"}).items():
        reader, task = FakeReader(), Passkey(samples=1, lengths="200", pack=pack)
        ask(task, reader)
        assert reader.packed == [pack]
        assert f"packed {words}" in task.about()
    with pytest.raises(UserError, match=r"pack is 'after'.*choose before-question or after-prompt or during-prefill"):
        Passkey(pack="after")  # type: ignore[arg-type]
