"""Folders in which every file registers itself by its name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType


def modules(package: str, path: Iterable[str]) -> dict[str, ModuleType]:
    """Return the modules of a package by name, sorted, without `base`."""
    names = sorted(module.name for module in pkgutil.iter_modules(path) if not module.ispkg and module.name != "base")
    return {name: importlib.import_module(f"{package}.{name}") for name in names}
