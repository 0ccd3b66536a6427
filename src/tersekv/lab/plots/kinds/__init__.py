"""Kinds of plots, one per file. A kind is registered under its file's name."""

from __future__ import annotations

import importlib
import pkgutil

from tersekv.extras import require
from tersekv.lab.plots.base import Plot

__all__ = ["Plot", "names", "plot"]


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
