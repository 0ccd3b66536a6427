"""Kinds of pictures, one per file: the file's name is its registration."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tersekv.lab.plots.base import Plot
from tersekv.registry import modules

__all__ = ["Plot", "names", "plot", "plots"]


def names() -> list[str]:
    """Every kind's name, sorted, without importing any."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def plot(name: str) -> Plot:
    """One of `names()`, alone; imports matplotlib."""
    return importlib.import_module(f"{__name__}.{name}").PLOT


@functools.lru_cache(maxsize=1)
def plots() -> dict[str, Plot]:
    """Every kind in this folder by name, sorted; imports matplotlib."""
    return {name: module.PLOT for name, module in modules(__name__, __path__).items()}
