"""tersekv: key-value caches packed to 2-5 bits, with attention computed on the packed bytes.

    import tersekv
    with tersekv.compress(model, "default"):
        model.generate(...)

The import patches nothing. transformers and the native kernels are loaded on first use of the names
below. The logger "tersekv" reports calibration, fitting, packing and kernels that cannot be used.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tersekv.errors import CacheError, UserError
    from tersekv.hf.cache import CompressedCache
    from tersekv.hf.compress import compress
    from tersekv.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["CacheError", "CompressedCache", "Recipe", "UserError", "__version__", "compress"]

_HOMES = {
    "CacheError": "tersekv.errors",
    "CompressedCache": "tersekv.hf.cache",
    "Recipe": "tersekv.recipe",
    "UserError": "tersekv.errors",
    "compress": "tersekv.hf.compress",
}

logging.getLogger("tersekv").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tersekv' has no attribute '{name}'; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
