"""Scores of answers as fractions, computed as in each benchmark's own script.

Oddities of those scripts are kept, so that numbers compare; the docstrings name them.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from tersekv.extras import require


def first_number(text: str) -> int | None:
    """Return the first run of digits (passkey retrieval)."""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else None


def last_number(text: str) -> int | None:
    """Return the last run of digits (LongEval)."""
    found = re.findall(r"\d+", text)
    return int(found[-1]) if found else None


def word_recall(answer: str, expected: str) -> float:
    """Return the distinct words of `expected` in the answer, divided by all words of `expected`.

    Source: Fu et al., visualize.py. A word that appears twice in `expected` counts once in the
    numerator and twice in the denominator, so a perfect answer may score below 1.
    """
    words = expected.lower().split()
    return len(set(answer.lower().split()) & set(words)) / len(words)


def printable(answer: str) -> str:
    """Replace control characters by line ends, as RULER does."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()


def match_all(answer: str, expected: Sequence[str]) -> float:
    """Return the share of expected strings in the answer, ignoring case (RULER's string_match_all)."""
    return sum(word.lower() in answer.lower() for word in expected) / len(expected)


def match_part(answer: str, expected: Sequence[str]) -> float:
    """Return 1 if one of the expected strings is in the answer, ignoring case (RULER's
    string_match_part)."""
    return float(any(word.lower() in answer.lower() for word in expected))


def token_f1(answer: str, expected: str) -> float:
    """Return the F1 score of the bags of words after SQuAD's normalisation.

    It converts to lower case and removes punctuation and the words a, an and the.
    """
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
    """Return the ROUGE-L F score of PyPI's `rouge` 1.0.

    Sentences end at every full stop. The overlap is the union, over all sentence pairs, of the
    words in their longest common subsequences. It is divided by the distinct words of each side.

    As in `rouge`, an answer without a sentence scores 0. Its score of 0 for sentence pairs that are
    too long for its recursion is not reproduced.
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
    """Return a longest common subsequence. Ties are broken as in `rouge`, which affects the union."""
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
    """Return the share of the answer's numbers equal to the expected one (LongBench's count and
    retrieval scores)."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(expected) / len(numbers) if numbers else 0.0


def paragraph_number(answer: str, expected: str) -> float:
    """Return `share_of_numbers` for the number in `Paragraph N` (LongBench's retrieval_score)."""
    found = re.search(r"Paragraph (\d+)", expected)
    return share_of_numbers(answer, found[1]) if found else 0.0


def classification(answer: str, expected: str, classes: Sequence[str]) -> float:
    """Return 1/n if the expected class is among the n classes named in the answer (LongBench).

    Classes whose names are proper parts of the expected name are not counted. LongBench removes
    them from the list while iterating over it, so the class after each removed one is skipped. This
    is kept.
    """
    named = [name for name in classes if name in answer]
    place = 0
    while place < len(named):
        if named[place] in expected and named[place] != expected:
            del named[place]
        place += 1
    return 1 / len(named) if expected in named else 0.0


def edit_similarity(answer: str, expected: str) -> float:
    """Return the similarity of the first code line of the answer with the expected line.

    It is `fuzz.ratio`, rounded to whole percent, of the first line that is neither a comment nor a
    code fence (LongBench's code_sim_score). The ratio equals that of `thefuzz`, and of `fuzzywuzzy`
    with python-Levenshtein. Without python-Levenshtein, `fuzzywuzzy` uses difflib's ratio.

    Raises:
        UserError: rapidfuzz is not installed.
    """
    require("LongBench's score of code", "rapidfuzz")
    from rapidfuzz import fuzz

    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, expected)) / 100
