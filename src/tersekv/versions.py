"""Versions of packages, and those of transformers that are tested or known to break."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tersekv.errors import UserError

ABSENT = "not installed"

OLDEST, NEWEST = (5, 16), (5, 24)
"""First and last tested release."""

BROKEN: dict[tuple[int, int], str] = {}
"""Releases that are known to break, each with the reason. They are refused."""


def package_version(name: str) -> str:
    """Return the version of a package, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ABSENT


def release(text: str) -> tuple[int, int]:
    """Return major and minor number of a version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def advice() -> str:
    """Return the tested versions and the command that installs one."""
    oldest, newest = (".".join(map(str, r)) for r in (OLDEST, NEWEST))
    return f"tested are {oldest} to {newest}; to install one: pip install 'transformers=={newest}.*'"


@functools.cache
def check_transformers() -> None:
    """Check the installed transformers once per process.

    A release after the tested ones gives a warning, because most of them work.

    Raises:
        UserError: the release is older than the oldest tested one, or is known to break.
    """
    installed = package_version("transformers")
    if installed == ABSENT:
        return  # a source tree on the path; importing it says what is missing
    found = release(installed)
    if found < OLDEST:
        raise UserError(f"transformers {installed} is too old for tersekv; {advice()}")
    if found in BROKEN:
        raise UserError(f"transformers {installed} does not work with tersekv ({BROKEN[found]}); {advice()}")
    if found > NEWEST:
        warnings.warn(f"transformers {installed} is newer than tersekv was tested with; {advice()}", stacklevel=4)


CACHE_NAMES = "cache", "past_key_values"
"""Names of a cache among arguments: from transformers 5.24 on, and before. Both are taken there for a while."""


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, or None."""
    for name in CACHE_NAMES:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return a cache as the keyword argument of calls of a model and of its `generate`."""
    return {cache_name(getattr(model, "forward", model)): cache}


def cache_name(function: Callable[..., Any]) -> str:
    """Return the name of the cache among a function's parameters."""
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[1])
