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
    from tersekv.hf.choice import choose
    from tersekv.hf.compress import compress
    from tersekv.models.loading import load as load_model
    from tersekv.recipe import Recipe, register_codec

__version__ = "0.1.0"
__all__ = [
    "CacheError",
    "CompressedCache",
    "Recipe",
    "UserError",
    "__version__",
    "choose",
    "compress",
    "load_model",
    "register_codec",
]

_HOMES = {
    "CacheError": ("tersekv.errors", "CacheError"),
    "CompressedCache": ("tersekv.hf.cache", "CompressedCache"),
    "Recipe": ("tersekv.recipe", "Recipe"),
    "UserError": ("tersekv.errors", "UserError"),
    "choose": ("tersekv.hf.choice", "choose"),
    "compress": ("tersekv.hf.compress", "compress"),
    "load_model": ("tersekv.models.loading", "load"),
    "register_codec": ("tersekv.recipe", "register_codec"),
}

logging.getLogger("tersekv").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tersekv' has no attribute '{name}'; it has {', '.join(__all__)}")
    module, there = _HOMES[name]
    try:
        return getattr(importlib.import_module(module), there)
    except ImportError as error:
        if not (error.name or "").startswith("transformers."):
            raise
        from tersekv.versions import advice

        raise ImportError(f"tersekv cannot use this transformers ({error}); {advice()}", name=error.name) from error


def __dir__() -> list[str]:
    return __all__
