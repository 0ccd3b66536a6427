"""Packages that only some commands need: the extra `lab` of pyproject.toml."""

from __future__ import annotations

import importlib

from tersekv.errors import UserError

LAB = {"matplotlib": "matplotlib", "gguf": "gguf", "scikit-learn": "sklearn", "rapidfuzz": "rapidfuzz"}
"""Each package of the extra `lab`, and the module that it installs."""

INSTALL_LAB = "pip install 'tersekv[lab]'"


def require(what: str, package: str) -> None:
    """Import a package of `LAB`, so that what needs it fails before it has begun.

    what: the command or function that needs it, the subject of the error's sentence.

    Raises:
        UserError: the package is not installed or cannot be imported; says how to install it.
    """
    module = LAB[package]
    try:
        importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = "is not installed" if absent else f"cannot be imported ({error})"
        raise UserError(f"{what} needs {package}, which {reason}: {INSTALL_LAB}") from error
