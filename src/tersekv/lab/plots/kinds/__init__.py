"""Kinds of plots, one per file. A kind is registered under its file's name."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from tersekv.extras import require
from tersekv.lab.plots.base import Plot
from tersekv.registry import modules

__all__ = ["Plot", "names", "plot", "plots"]


def names() -> list[str]:
    """Return the names of all kinds, sorted, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def plot(name: str) -> Plot:
    """Return one of `names()` after checking that its packages are installed.

    Raises:
        UserError: matplotlib or another package that this kind needs is not installed.
    """
    require(f"plot {name}", "matplotlib")
    found: Plot = importlib.import_module(f"{__name__}.{name}").PLOT
    for package in found.needs:
        require(f"plot {name}", package)
    return found


@functools.lru_cache(maxsize=1)
def plots() -> dict[str, Plot]:
    """Return all kinds in this folder by name, sorted.

    Raises:
        UserError: matplotlib is not installed.
    """
    require("drawing", "matplotlib")
    return {name: module.PLOT for name, module in modules(__name__, __path__).items()}
