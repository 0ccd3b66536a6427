"""Folders in which every file registers itself by its name, and what docstrings say of options."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable
from types import ModuleType


def modules(package: str, path: Iterable[str]) -> dict[str, ModuleType]:
    """Return the modules of a package by name, sorted, without `base`."""
    names = sorted(module.name for module in pkgutil.iter_modules(path) if not module.ispkg and module.name != "base")
    return {name: importlib.import_module(f"{package}.{name}") for name in names}


def sentences(thing: object) -> dict[str, str]:
    """Return what the docstrings of a function, or of a class and its bases, say of each option.

    A docstring names options at the start of a line, and may go on in indented lines:

        budget: tokens kept, sinks included.
        - kernel: number of tokens
          per pool.
    """
    found: dict[str, str] = {}
    for one in inspect.getmro(thing) if isinstance(thing, type) else (thing,):
        for names, said in _OPTION.findall(inspect.cleandoc(one.__doc__ or "")):
            text = _PLACE.sub("", " ".join(said.split())).rstrip(".") + "."
            found = dict.fromkeys(names.split(", "), text) | found
    return found


_OPTION = re.compile(r"^(?:- )?(\w+(?:, \w+)*): (.+(?:\n +\S.*)*)", re.MULTILINE)
_PLACE = re.compile(r",? (?:see `[\w/]+\.py`|\(`[\w/]+\.(?:py|md)`\))")
"""A reference to a file, which readers of the program's output do not have."""
