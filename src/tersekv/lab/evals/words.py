"""Word lists for keys and lists of words.

RULER and LongEval use the lists of the package wonderwords. Its files (adjectivelist.txt,
nounlist.txt, verblist.txt, one word per line) are read from a folder if one is given. Otherwise the
words of the corpus `pydoc` are distributed over the three lists in alphabetical order, so an
"adjective" may be any word. They depend on the version of Python.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tersekv.calibration.text import pydoc_text
from tersekv.errors import UserError

FILES = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")


@dataclass(frozen=True)
class Words:
    """Three word lists."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]

    @property
    def every(self) -> list[str]:
        """All words, sorted, each once."""
        return sorted({*self.adjectives, *self.nouns, *self.verbs})

    def key(self, rng: Random) -> str:
        """Return a random key such as `torpid-kid`."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def keys(self, rng: Random, count: int) -> list[str]:
        """Return `count` different keys in the order in which they were drawn.

        Raises:
            UserError: the lists have too few words.
        """
        adjectives, nouns = len({*self.adjectives}), len({*self.nouns})
        if count > adjectives * nouns:
            raise UserError(
                f"{count:,} different keys are needed, and {adjectives:,} adjectives and {nouns:,} nouns make "
                f"{adjectives * nouns:,}: give longer {FILES[0]} and {FILES[1]}"
            )
        made: dict[str, None] = {}
        while len(made) < count:
            made[self.key(rng)] = None
        return list(made)


@functools.lru_cache(maxsize=4)
def word_lists(folder: str = "") -> Words:
    """Return the lists in `folder`, or those of the corpus `pydoc` if it has none.

    Raises:
        UserError: only some of the lists exist, or one cannot be read.
    """
    paths = [Path(folder) / name for name in FILES]
    if folder and any(path.exists() for path in paths):
        return Words(*(_read(path) for path in paths))
    words = sorted(set(re.findall(r"\b[a-z]{3,12}\b", pydoc_text())))
    return Words(tuple(words[0::3]), tuple(words[1::3]), tuple(words[2::3]))


def _read(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the word list {path}: give a folder with {', '.join(FILES)}, or none of them"
        ) from error
    words = tuple(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not words:
        raise UserError(f"the word list {path} is empty: write one word per line")
    return words
