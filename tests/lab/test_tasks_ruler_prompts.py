"""RULER: every template exactly, and the output of each generator."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from conftest import data_folder
from fake_reader import questions as questions
from tersekv.errors import UserError
from tersekv.lab.evals import ruler_documents, ruler_lists, ruler_needles
from tersekv.lab.evals.cases import Case
from tersekv.lab.evals.haystack import NOISE
from tersekv.lab.evals.words import word_lists

ESSAY = tuple(("One sentence here. Another one there. " * 30).split())
KEY = r"[a-z]+-[a-z]+"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def needles(name: str, size: int = 20, seed: int = 0) -> tuple[Case, str]:
    """Return a case and its whole prompt."""
    case = ruler_needles.build(ruler_needles.KINDS[name], size, Random(seed), word_lists(), ESSAY)
    return case, case.prompt.context + case.prompt.question + case.prompt.answer_start


def test_single_needle_to_the_letter() -> None:
    case, text = needles("niah_single_1", 3)
    (value,) = case.expected
    key = re.search(f"number for ({KEY}) mentioned", text)[1]  # type: ignore[index]
    needle = f"One of the special magic numbers for {key} is: {value}."
    lines = text.split("\n")
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards."
    )
    assert sorted(lines[1:-1]) == sorted([needle, NOISE, NOISE, NOISE])
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )
    assert case.prompt.answer_start.startswith(" The special")
    assert (case.new_tokens, case.gold) == (128, f" {value}")


def test_several_needles_to_the_letter() -> None:
    case, text = needles("niah_multiquery", 200)
    assert text.startswith(
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n"
    )
    asked = re.search(r"\nWhat are all the special magic numbers for (.*) mentioned in the provided text\?", text)
    assert asked
    assert re.fullmatch(f"{KEY}, {KEY}, {KEY}, and {KEY}", asked[1])
    assert text.endswith(f" The special magic numbers for {asked[1]} mentioned in the provided text are")
    keys = re.split(r", (?:and )?", asked[1])
    assert case.expected == tuple(re.search(f"numbers for {key} is: (\\d{{7}})\\.", text)[1] for key in keys)  # type: ignore[index]
    assert case.gold is None


@pytest.mark.parametrize(
    ("name", "needle", "count", "answers"),
    [
        ("niah_single_1", f"numbers for {KEY} is: \\d{{7}}", 1, 1),
        ("niah_single_2", f"numbers for {KEY} is: \\d{{7}}", 1, 1),
        ("niah_single_3", f"uuids for {KEY} is: {UUID}", 1, 1),
        ("niah_multikey_1", f"numbers for {KEY} is: \\d{{7}}", 4, 1),
        ("niah_multikey_2", f"numbers for {KEY} is: \\d{{7}}", 21, 1),
        ("niah_multikey_3", f"uuids for {UUID} is: {UUID}", 21, 1),
        ("niah_multivalue", f"numbers for {KEY} is: \\d{{7}}", 4, 4),
        ("niah_multiquery", f"numbers for {KEY} is: \\d{{7}}", 4, 4),
    ],
)
def test_needles(name: str, needle: str, count: int, answers: int) -> None:
    for seed in range(5):
        case, text = needles(name, 20, seed)
        assert len(re.findall(f"One of the special magic {needle}\\.", text)) == count
        assert len(set(case.expected)) == answers
        assert all(value in case.prompt.context for value in case.expected)
        keys = len(set(re.findall(r"for (\S+) is:", text)))
        assert keys == (1 if name == "niah_multivalue" else count)


def test_essay_needles_are_between_sentences() -> None:
    _, text = needles("niah_multikey_1", 100, 1)
    essay = re.sub(r"(^| )One of the special magic numbers for \S+ is: \d+\.", "", text.split("\n")[1])
    assert essay.strip() == " ".join((ESSAY * 2)[:100])
    assert "sentence One of" not in text


def test_variable_tracking_to_the_letter() -> None:
    case = ruler_lists.variables(6, 5, Random(0))
    text = case.prompt.context + case.prompt.question + case.prompt.answer_start
    shown, asked = text.split("\n\nMemorize")
    pattern = (
        r"Memorize and track the chain\(s\) of variable assignment hidden in the following text\.\n\n(.*)\n"
        r"Question: Find all variables that are assigned the value (\d{5}) in the text above\. "
        r"Answer: According to the chain\(s\) of variable assignment in the text above, 5 variables are assigned the "
        r"value \2, they are:"
    )
    found = re.fullmatch(pattern, "Memorize" + asked, re.DOTALL)
    assert found
    assert found[1].count(NOISE) == 6
    names = case.expected
    wanted = [f"VAR {names[0]} = {found[2]}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    assert [line for line in found[1].split("\n") if line != NOISE] == wanted
    assert all(re.fullmatch("[A-Z]{5}", name) for name in names)
    example = re.fullmatch(pattern + "  ([A-Z]{3} ?){5}", shown, re.DOTALL)
    assert example
    assert example[1].count(NOISE) == 5
    assert case.new_tokens == 30


@pytest.mark.parametrize(("length", "often", "seldom", "example"), [(4095, 6, 1, 40), (4096, 30, 3, 190)])
def test_common_words_to_the_letter(length: int, often: int, seldom: int, example: int) -> None:
    case = ruler_lists.common_words(25, length, Random(0), word_lists())
    head = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n"
    )
    question = "\nQuestion: What are the 10 most common words in the above list?"
    answer = " Answer: The top 10 words that appear most often in the list are:"
    assert (case.prompt.question, case.prompt.answer_start, case.new_tokens) == (question, answer, 120)
    empty, shown, asked = case.prompt.context.split(head)
    assert empty == ""
    shown_list, shown_answer = shown.split(question + answer + " ")
    assert re.fullmatch(r"1\. \w+ 2\. \w+ .* 10\. \w+\n", shown_answer)
    assert shown_list.split()[-2] == f"{example}."
    counts = Counter(asked.split()[1::2])
    assert sorted(counts.values()) == [seldom] * 15 + [often] * 10
    assert {word for word, count in counts.items() if count == often} == set(case.expected)
    assert asked.split()[0::2] == [f"{i}." for i in range(1, 10 * often + 15 * seldom + 1)]


def test_frequent_words_to_the_letter() -> None:
    case = ruler_lists.frequent_words(300, 2048, Random(0))
    head = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. "
    )
    assert case.prompt.question == (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    assert case.prompt.answer_start == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    counts = Counter(case.prompt.context.removeprefix(head).split())
    ranked = counts.most_common()
    assert [word for word, _ in ranked[:4]] == ["...", *case.expected]
    assert [count for _, count in ranked[:4]] == [182, 45, 20, 11]  # 300 / (k²·π²/6)
    assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")
    assert len(set(ruler_lists.frequent_words(ruler_lists.FWE_LEAST, 100, Random(0)).expected)) == 3


def test_questions_to_the_letter(questions: str) -> None:
    case = ruler_documents.build(ruler_documents.read("qa_1", questions), 0, 2, Random(0))
    instruction = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    text = case.prompt.context + case.prompt.question + case.prompt.answer_start
    found = re.fullmatch(
        rf"{re.escape(instruction)}\n\nThe following are given documents\.\n\nDocument 1:\n(.*)\n\n"
        rf"Document 2:\n(.*)\n\n{re.escape(instruction)}\n\nQuestion: Q00\? Answer:",
        text,
    )
    assert found
    assert "Article 0, paragraph 0." in found.groups()  # the other is of the same article
    assert all(text.startswith("Article 0") for text in found.groups())
    assert (case.expected, case.new_tokens) == (("A00",), 32)


def test_needed_documents_are_included(questions: str) -> None:
    squad, hotpot = (ruler_documents.read(name, questions) for name in ("qa_1", "qa_2"))
    assert (len(squad.texts), len(squad.asked), len(hotpot.texts), len(hotpot.asked)) == (12, 12, 30, 3)
    places = set()
    for seed in range(20):
        case = ruler_documents.build(squad, 4, 12, Random(seed))
        places.add(case.prompt.context.split("Article 1, paragraph 1.")[0].count("Document"))
    assert len(places) > 5
    for size in (2, 5, 10, 30):
        text = ruler_documents.build(hotpot, 1, size, Random(size)).prompt.context
        assert "T1-2\nText 1-2. More." in text
        assert "T1-7\nText 1-7. More." in text
        assert text.count("Document ") == size
        assert text.count("Text 1-") == min(size, 10)


def test_shared_question_sets() -> None:
    folder = data_folder()
    if folder is None or not (folder / "ruler" / "xquad.en.json").is_file():
        pytest.skip("the question sets of RULER are not next to the checkout")
    squad, hotpot = (ruler_documents.read(name, str(folder / "ruler")) for name in ("qa_1", "qa_2"))
    assert (len(squad.texts), len(squad.asked), len(hotpot.asked)) == (240, 1190, 100)
    assert all(len(q.needed) + len(q.near) == 10 for q in hotpot.asked[:20])


def test_a_file_in_another_layout(tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text("[]")
    with pytest.raises(UserError, match=r"is not in the layout of squad\.json"):
        ruler_documents.read("qa_1", str(tmp_path))
