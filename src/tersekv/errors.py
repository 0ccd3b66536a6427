"""Exceptions of the library. Each message says what came, what is allowed and what to do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong option, recipe, model or input.

    The program prints the text on one line and exits with status 2.
    """


class CacheError(RuntimeError):
    """Data or a request that the cache cannot honour, such as NaN keys or too long a rollback."""


def hint(word: str, known: Iterable[str]) -> str:
    """Return `, did you mean 'x'?` with the most similar known name, or "" if none is similar."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f", did you mean '{by_lower[close[0]]}'?" if close else ""


OTHER_TOOLS = (
    (r"nf(\d).*", "normalfloat:bits={}"),
    (r"iq4.*|(?:nv|mx)?fp4.*", "normalfloat:bits=4,group=32"),
    (r"i?q(\d)(?:_.*)?", "uniform:bits={},group=32"),
    (r"(?:quanto|hqq|kivi)[-_]?(\d)(?:bit)?", "kivi:bits={}"),
    (r"[us]?int(\d)(?:_.*)?|(\d)[-_]?bits?", "uniform:bits={},group=64"),
    (r"(?:fp|float)8.*|e[45]m[23].*", "uniform:bits=8,group=0"),
    (r"(?:fp?|bf|float|bfloat)(?:16|32)", "exact"),
)
"""Names that other tools give to types of a cache (q8_0, nf4, fp8_e4m3), and the nearest recipe with as many bits."""


def of_other_tools(name: str) -> str:
    """Return the end of a sentence about a name that other tools have, with the nearest recipe, or ""."""
    for pattern, recipe in OTHER_TOOLS:
        if found := re.fullmatch(pattern, name.lower()):
            nearest = recipe.format(*filter(None, found.groups()))
            return f", a name of other tools; the nearest recipe is {nearest}, and default takes 3.5 bits."
    return ""
