"""Optional packages that only some commands need: the extras `lab`, `serve` and `storage` in pyproject.toml."""

from __future__ import annotations

import importlib

from tersekv.errors import UserError

LAB = {"matplotlib": "matplotlib", "gguf": "gguf", "scikit-learn": "sklearn", "rapidfuzz": "rapidfuzz"}
"""Package name -> module name, for each package of the extra `lab`."""

SERVE = {"starlette": "starlette", "uvicorn": "uvicorn"}
"""The same for the extra `serve`."""

STORAGE = {"zstandard": "zstandard", "pcodec": "pcodec"}
"""The same for the extra `storage`."""

INSTALL_LAB, INSTALL_SERVE, INSTALL_STORAGE = (f"pip install 'tersekv[{name}]'" for name in ("lab", "serve", "storage"))


def require(what: str, package: str) -> None:
    """Check that a package of an extra can be imported, so that a command fails early without it.

    what: the command or function that needs the package; the subject of the error's sentence.

    Raises:
        UserError: the package is not installed or cannot be imported. Says how to install it.
    """
    module = {**LAB, **SERVE, **STORAGE}[package]
    try:
        importlib.import_module(module)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = "is not installed" if absent else f"cannot be imported ({error})"
        how = INSTALL_SERVE if package in SERVE else INSTALL_STORAGE if package in STORAGE else INSTALL_LAB
        raise UserError(f"{what} needs {package}, which {reason}: {how}") from error
