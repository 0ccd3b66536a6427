"""Exceptions of the library. Each message says what came, what is allowed and what to do."""

from __future__ import annotations

import difflib
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
