"""Scores of cases computed by hand, including oddities of the original scripts."""

from __future__ import annotations

import sys

import pytest

from tersekv.errors import UserError
from tersekv.lab.evals import scores
from tersekv.lab.evals.tasks.needle import EATEN


def test_numbers() -> None:
    assert scores.first_number(" 123.\nThe pass key is 45") == 123
    assert scores.last_number("The <REGISTER_CONTENT> in line 7 is <0123>.") == 123
    assert scores.first_number("no key") is scores.last_number("") is None


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (EATEN, 11),  # a perfect answer has 11 of 12, because "a" is expected twice
        ("The best thing is to EAT a sandwich and sit in Dolores Park on a sunny day.", 11),
        ("eat a sandwich and sit in Dolores Park on a sunny day", 10),  # the full stop belongs to the last word
        ("a a a", 1),
        ("", 0),
    ],
)
def test_recall_of_fu(answer: str, found: int) -> None:
    assert scores.word_recall(answer, EATEN) == found / 12


def test_ruler() -> None:
    assert scores.printable(" 12\x00\t34 ") == "12\n\n34"
    assert scores.match_all("ABC and def", ["abc", "DEF", "ghi"]) == pytest.approx(2 / 3)
    assert scores.match_part("in 1912", ["1912", "the year 1912"]) == 1
    assert scores.match_part("in 1913", ["1912", "the year 1912"]) == 0


def test_token_f1() -> None:
    assert scores.token_f1("The Bob Dylan!", "bob dylan") == 1
    assert scores.token_f1("Bob Dylan of the band", "Bob Dylan") == pytest.approx(2 * (2 / 4) * 1 / (2 / 4 + 1))
    assert scores.token_f1("bob bob", "bob dylan") == pytest.approx(0.5)
    assert scores.token_f1("the", "a") == scores.token_f1("", "x") == 0


@pytest.mark.parametrize(
    ("answer", "expected", "words", "of_answer", "of_expected"),
    [
        ("the cat sat", "the cat sat", 3, 3, 3),
        ("the cat", "the cat sat", 2, 2, 3),
        ("sat cat the", "the cat sat", 1, 3, 3),  # one word, because a subsequence keeps the order
        ("a b. c d", "a c. b d", 4, 4, 4),  # the union over pairs of sentences
        ("a a a b", "a b", 2, 2, 2),  # distinct words
        ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 4, 8, 5),  # ROUGE's own example
        ("b a", "a b", 1, 2, 2),
    ],
)
def test_rouge_l(answer: str, expected: str, words: int, of_answer: int, of_expected: int) -> None:
    p, r = words / of_answer, words / of_expected
    assert scores.rouge_l(answer, expected) == pytest.approx(2 * p * r / (p + r), abs=1e-7)


def test_rouge_l_prefers_the_subsequence_that_rouge_finds() -> None:
    """For "a b" and "b a" it keeps b with the reference, so the second sentence adds nothing."""
    assert scores._common_subsequence(["a", "b"], ["b", "a"]) == ["b"]
    assert scores._common_subsequence(list("xaybz"), list("ab")) == ["a", "b"]


def test_rouge_l_of_nothing() -> None:
    assert scores.rouge_l("", "a") == scores.rouge_l("...", "a") == scores.rouge_l("a", "") == 0
    assert scores.rouge_l(" ", "a") == 0


def test_shares_of_numbers() -> None:
    assert scores.share_of_numbers("7, 8 or 7", "7") == pytest.approx(2 / 3)
    assert scores.share_of_numbers("none", "7") == 0
    assert scores.paragraph_number("Paragraph 19, not 2", "Paragraph 19") == 0.5


def test_classification() -> None:
    classes = ["Food", "Other", "Other location", "Date"]
    assert scores.classification("Type: Food", "Food", classes) == 1
    assert scores.classification("Food or Date", "Food", classes) == 0.5
    assert scores.classification("Date", "Food", classes) == 0
    assert scores.classification("Other location", "Other location", classes) == 1  # "Other" is removed
    assert scores.classification("Other location", "Other", classes) == 0.5


def test_classification_skips_the_class_after_each_removed_one() -> None:
    """LongBench's script removes entries from the list over which it iterates, so "b" stays."""
    assert scores.classification("abc", "abc", ["a", "b", "abc"]) == 0.5


def test_edit_similarity() -> None:
    pytest.importorskip("rapidfuzz")
    assert scores.edit_similarity("\nreturn x\nreturn y", "return x") == 1
    assert scores.edit_similarity("```python\n# so\n// so\nreturn x", "return x") == 1
    assert scores.edit_similarity("return", "return x") == 0.86  # 2·6/14, in whole percent
    assert scores.edit_similarity("```", "return x") == 0


def test_edit_similarity_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rapidfuzz", None)
    with pytest.raises(UserError, match=r"tersekv\[lab\]"):
        scores.edit_similarity("a", "b")
