"""The exceptions of the library, and how they are worded: what came, what is allowed, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong option, recipe, model or input. The program prints its text as one line and exits with status 2."""


class CacheError(RuntimeError):
    """The cache was given data or a request that it cannot honour (NaN keys, a rollback past what is kept)."""


def hint(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that names a near miss: `, did you mean 'x'?`, or nothing."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f", did you mean '{by_lower[close[0]]}'?" if close else ""
