"""Haystacks, word lists, lengths, and common parts of question-answering tasks."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import data_folder
from fake_reader import FakeReader
from tersekv.errors import UserError
from tersekv.lab.evals import haystack
from tersekv.lab.evals.cases import Case, check_choice, chosen, mean_of_subtasks
from tersekv.lab.evals.prompt import Prompt
from tersekv.lab.evals.tasks.base import Estimate
from tersekv.lab.evals.words import FILES, word_lists
from tersekv.units import parse_lengths, parse_numbers, parse_tokens

READER = FakeReader()


@given(st.integers(0, 40), st.integers(0, 40), st.integers(-1, 45))
def test_largest(least: int, most: int, limit: int) -> None:
    fitting = [n for n in range(least, most + 1) if n <= limit]
    assert haystack.largest(lambda n: n <= limit, least, most) == (max(fitting) if fitting else None)


def test_first_tokens_repeats_short_texts() -> None:
    assert haystack.first_tokens(READER, "One two three.", 3) == "One two three"
    assert haystack.first_tokens(READER, "One two.", 7) == "One two.\n\nOne two"
    assert haystack.first_tokens(READER, "One", 0) == ""
    assert haystack.first_tokens(READER, f"{'x' * 100} One two.", 2) == f"{'x' * 100} One"


@pytest.mark.parametrize(
    ("depth", "before"),
    [
        (0, ""),
        (30, ""),  # no sentence has ended
        (60, "See sys.path there."),  # not inside sys.path
        (99, "See sys.path there. And here."),
        (100, "See sys.path there. And here. Some more"),
    ],
)
def test_needles_are_between_sentences(depth: int, before: str) -> None:
    text = "See sys.path there. And here. Some more"
    assert haystack.insert(READER, text, "|", depth) == before + "|" + text[len(before) :]


def test_an_empty_line_ends_a_sentence() -> None:
    assert haystack.insert(READER, "a list\n\nof things", "|", 90) == "a list\n\n|of things"


def test_middle_cut() -> None:
    assert haystack.middle_cut(READER, "a b c d e f", 4) == ("a b", " e f")
    assert haystack.middle_cut(READER, "a b c d e f", 5) == ("a b", " e f")
    assert haystack.middle_cut(READER, "a b c d e f", 6) == ("a b c d e f", "")


def test_spread_keeps_order() -> None:
    for seed in range(20):
        mixed = haystack.spread(list("abcde"), list("12345"), Random(seed))
        assert [x for x in mixed if x.isdigit()] == list("12345")
        assert [x for x in mixed if x.isalpha()] == list("abcde")
        assert mixed[-1] == "e"  # needles are inserted before items
    with pytest.raises(ValueError, match="2 needles among 1"):
        haystack.spread(["a"], ["1", "2"], Random(0))


def test_sentences() -> None:
    assert haystack.sentences(" One. Two?  Three 3.5!\nFour") == ["One.", "Two?", "Three 3.5!", "Four"]


def test_texts(tmp_path: Path) -> None:
    (tmp_path / "essay.txt").write_text("Some prose.")
    (tmp_path / "empty.txt").write_text(" \n")
    assert haystack.read_text(str(tmp_path / "essay.txt")) == "Some prose."
    assert len(haystack.read_text("pydoc")) > 100_000
    with pytest.raises(UserError, match="is empty"):
        haystack.read_text(str(tmp_path / "empty.txt"))
    with pytest.raises(UserError, match="cannot read the text"):
        haystack.read_text(str(tmp_path / "none.txt"))


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(UserError, match="use a fast tokenizer"):
        haystack.token_spans(SimpleNamespace(tokenizer=SimpleNamespace(is_fast=False)), "text")  # type: ignore[arg-type]


def test_prompt_tokens_count_the_template_or_special_tokens() -> None:
    assert haystack.prompt_tokens(READER, Prompt("a b", " c", "d")) == 4 + 6
    assert haystack.prompt_tokens(READER, Prompt("a b", " c", " d", chat=False)) == 4 + 1
    assert haystack.prompt_tokens(FakeReader(chat=False), Prompt("a b", " c", " d")) == 4 + 1


def test_words_of_pydoc() -> None:
    words = word_lists()
    assert len(words.every) > 1500
    assert set(words.adjectives).isdisjoint(words.nouns)
    assert words.keys(Random(0), 50) == words.keys(Random(0), 50)
    assert len(set(words.keys(Random(0), 500))) == 500


def test_words_of_a_folder(tmp_path: Path) -> None:
    assert word_lists(str(tmp_path)) == word_lists()
    for name, words in zip(FILES, ("big\nred\n", "dog\n\ndog\n", "run"), strict=True):
        (tmp_path / name).write_text(words)
    word_lists.cache_clear()
    assert word_lists(str(tmp_path)).every == ["big", "dog", "red", "run"]
    assert sorted(word_lists(str(tmp_path)).keys(Random(0), 2)) == ["big-dog", "red-dog"]
    with pytest.raises(UserError, match="3 different keys are needed, and 2 adjectives and 1 nouns make 2"):
        word_lists(str(tmp_path)).keys(Random(0), 3)
    (tmp_path / FILES[0]).write_text("\n")
    word_lists.cache_clear()
    with pytest.raises(UserError, match="is empty"):
        word_lists(str(tmp_path))
    (tmp_path / FILES[0]).unlink()
    with pytest.raises(UserError, match="cannot read the word list"):
        word_lists(str(tmp_path))


def test_words_of_wonderwords() -> None:
    folder = data_folder()
    if folder is None or not (folder / "ruler" / FILES[0]).is_file():
        pytest.skip("the word lists of wonderwords are not next to the checkout")
    words = word_lists(str(folder / "ruler"))
    assert (len(words.adjectives), len(words.nouns), len(words.verbs)) == (910, 6782, 1041)


def test_lengths() -> None:
    assert parse_lengths("1k, 2048,1.5k,2k") == (1024, 2048, 1536)
    assert parse_numbers("0, 50,50", "depths", 0, 100) == (0, 50)
    assert parse_tokens("1M") == 1 << 20
    for wrong in ("", "1k,", "x", "0", "1.0001k"):
        with pytest.raises(UserError, match="lengths"):
            parse_lengths(wrong)
    for wrong in ("", "101", "-1", "5.5", "9" * 50):
        with pytest.raises(UserError, match="write whole numbers from 0 to 100"):
            parse_numbers(wrong, "depths", 0, 100)


def test_choices() -> None:
    assert chosen("b, a,b", ("a", "b", "c"), "subtasks") == ("b", "a")
    assert chosen("all", ("a", "b", "c"), "subtasks") == ("a", "b", "c")
    with pytest.raises(UserError, match="did you mean 'qasper'"):
        chosen("qaspar", ("qasper", "trec"), "subtasks")
    with pytest.raises(UserError, match="choose pose or landmark"):
        check_choice("PoSE", ("pose", "landmark"), "variant")


@pytest.mark.parametrize(
    ("prompt", "gold"),
    [
        (Prompt("c", "q?"), "7"),  # its own answer
        (Prompt("c", "q?", " It is"), " 7"),
        (Prompt("c", "q? It is", chat=False), " 7"),
        (Prompt("c", "q?\n", chat=False), "7"),
    ],
)
def test_gold_follows_the_prompt(prompt: Prompt, gold: str) -> None:
    assert Case("", prompt, ("7",), 1).gold == gold
    assert Case("", prompt, ("7",), 1, single=False).gold is None
    assert Case("", prompt, ("7", "8"), 1).gold is None


def test_a_long_right_answer_counts() -> None:
    assert Case("", Prompt("a", chat=False), ("b c d e",), 2).tokens(READER) == 1 + 1 + 4
    assert Case("", Prompt("a", chat=False), ("b c d e",), 9).tokens(READER) == 1 + 1 + 9


def test_mean_of_subtasks() -> None:
    parts = {"accuracy": Estimate(9, 9), "accuracy_a": Estimate(1.0, 0.3), "accuracy_b": Estimate(0.5, 0.4)}
    assert mean_of_subtasks(parts)["accuracy"] == Estimate(0.75, pytest.approx(0.25))
    assert math.isnan(mean_of_subtasks({**parts, "accuracy_b": Estimate(0.5, math.nan)})["accuracy"].stderr)
    assert mean_of_subtasks({"f": Estimate(1, 1)}) == {"f": Estimate(1, 1)}
