"""Kinds of pictures, one per file: the file's name is its registration."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tersekv.extras import require
from tersekv.lab.plots.base import Plot
from tersekv.registry import modules

__all__ = ["Plot", "names", "plot", "plots"]


def names() -> list[str]:
    """Every kind's name, sorted, without importing any."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def plot(name: str) -> Plot:
    """One of `names()`, alone, with the packages that it needs.

    Raises:
        UserError: matplotlib, or what this kind needs besides, is not installed.
    """
    require(f"plot {name}", "matplotlib")
    found: Plot = importlib.import_module(f"{__name__}.{name}").PLOT
    for package in found.needs:
        require(f"plot {name}", package)
    return found


@functools.lru_cache(maxsize=1)
def plots() -> dict[str, Plot]:
    """Every kind in this folder by name, sorted.

    Raises:
        UserError: matplotlib is not installed.
    """
    require("drawing", "matplotlib")
    return {name: module.PLOT for name, module in modules(__name__, __path__).items()}
