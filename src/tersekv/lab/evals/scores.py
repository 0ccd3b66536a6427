"""Scores of answers, as fractions, each as the benchmark's own script computes it; what that script does oddly and is
kept, so that numbers compare, is said in the docstring."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from tersekv.extras import require


def first_number(text: str) -> int | None:
    """The first run of digits (passkey retrieval)."""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else None


def last_number(text: str) -> int | None:
    """The last run of digits (LongEval)."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def word_recall(answer: str, expected: str) -> float:
    """Distinct words of `expected` that the answer has, over all its words (Fu et al., visualize.py).

    A word that `expected` has twice counts once above and twice below, so a perfect answer may score less than 1.
    """
    words = expected.lower().split()
    return len(set(answer.lower().split()) & set(words)) / len(words)


def printable(answer: str) -> str:
    """RULER's clean-up: control characters become line ends."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()


def match_all(answer: str, expected: Sequence[str]) -> float:
    """The share of expected strings in the answer, whatever the case (RULER's string_match_all)."""
    return sum(word.lower() in answer.lower() for word in expected) / len(expected)


def match_part(answer: str, expected: Sequence[str]) -> float:
    """1 if one of the expected strings is in the answer, whatever the case (RULER's string_match_part)."""
    return float(any(word.lower() in answer.lower() for word in expected))


def token_f1(answer: str, expected: str) -> float:
    """F1 of the bags of words after SQuAD's normalisation: lower case, no punctuation, no a, an, the."""
    got, wanted = _normal_words(answer), _normal_words(expected)
    same = sum((Counter(got) & Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(got), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _normal_words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def rouge_l(answer: str, expected: str) -> float:
    """ROUGE-L F of PyPI's `rouge` 1.0: sentences end at every full stop; words in the union over sentence pairs of
    their longest common subsequences, over the distinct words of each side.

    As there, an answer without a sentence scores 0. Not kept: its 0 for pairs of sentences too long for its recursion.
    """
    got, wanted = _dotted_sentences(answer), _dotted_sentences(expected)
    if not got or not wanted:
        return 0.0
    union: set[str] = set()
    for reference in wanted:
        for sentence in got:
            union |= set(_common_subsequence(reference, sentence))
    recall = len(union) / len({word for sentence in wanted for word in sentence})
    precision = len(union) / len({word for sentence in got for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _dotted_sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common_subsequence(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several the one that `rouge` finds, which counts for the union."""
    table = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, a in enumerate(x, 1):
        for j, b in enumerate(y, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if a == b else max(table[i - 1][j], table[i][j - 1])
    found: list[str] = []
    i, j = len(x), len(y)
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            found.append(x[i])
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def share_of_numbers(answer: str, expected: str) -> float:
    """The share of the answer's numbers that are the expected one (LongBench's count and retrieval scores)."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(expected) / len(numbers) if numbers else 0.0


def paragraph_number(answer: str, expected: str) -> float:
    """`share_of_numbers` with the number in `Paragraph N` (LongBench's retrieval_score)."""
    found = re.search(r"Paragraph (\d+)", expected)
    return share_of_numbers(answer, found[1]) if found else 0.0


def classification(answer: str, expected: str, classes: Sequence[str]) -> float:
    """1/n if the expected class is among the n classes named in the answer, but for those that are proper parts of
    its name (LongBench).

    Kept: classes are struck off the list that is gone through, so the one after each that is struck is not looked at.
    """
    named = [name for name in classes if name in answer]
    place = 0
    while place < len(named):
        if named[place] in expected and named[place] != expected:
            del named[place]
        place += 1
    return 1 / len(named) if expected in named else 0.0


def edit_similarity(answer: str, expected: str) -> float:
    """Levenshtein-type ratio, in whole percent, of the answer's first line that is no comment or fence (LongBench's
    code_sim_score with `fuzz.ratio`, which rounds).

    The ratio is that of `thefuzz` and of `fuzzywuzzy` with python-Levenshtein; without it, `fuzzywuzzy` uses difflib's.

    Raises:
        UserError: rapidfuzz is not installed.
    """
    require("LongBench's score of code", "rapidfuzz")
    from rapidfuzz import fuzz

    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, expected)) / 100
