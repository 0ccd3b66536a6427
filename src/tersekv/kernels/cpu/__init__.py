"""Load the C++ extension and choose its instruction set. It is loaded at the first call, never at
import."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from tersekv.errors import UserError
from tersekv.kernels.registry import NOT_BUILT, NotTaken

ISA_VARIABLE = "TERSEKV_CPU_ISA"
INSTALL = (
    "install g++ or clang, then install tersekv again: pip install --force-reinstall --no-cache-dir --no-deps . "
    "in its checkout"
)

_module: ModuleType | None = None


def why_not_built() -> str | None:
    """Load the extension; return None if that works, else the reason."""
    global _module
    if _module is not None:
        return None
    try:
        module = importlib.import_module("tersekv.kernels.cpu._native")
    except ImportError as error:
        return f"{NOT_BUILT}: {error} ({INSTALL})"
    forced = os.environ.get(ISA_VARIABLE)
    if forced:
        try:
            module.set_isa(forced)
        except ValueError as error:
            raise UserError(f"{ISA_VARIABLE}: {error}") from None
    _module = module
    return None


def loaded() -> ModuleType:
    """Return the extension.

    Raises:
        NotTaken: it is not built.
    """
    if _module is None and (reason := why_not_built()):
        raise NotTaken(reason)
    assert _module is not None
    return _module


def isa() -> str:
    """Return the name of the instruction set in use."""
    return loaded().isa()


def isas() -> dict[str, str | None]:
    """Return the instruction sets of this build, best first: None if this CPU has it, else the
    missing features."""
    return {name: missing or None for name, missing in loaded().isas()}


def set_isa(name: str) -> None:
    """Use one instruction set, or "auto" for the best. A ValueError names the valid ones or the
    missing CPU features."""
    loaded().set_isa(name)
