"""Coding methods. Each file registers one method by its name."""

from __future__ import annotations

import functools

from tersekv.codecs.base import Codec, Method, Pair, TableBytes, for_both_sides
from tersekv.errors import UserError
from tersekv.registry import modules

__all__ = ["Codec", "Method", "Pair", "TableBytes", "method_of", "methods"]

registered: dict[str, Method] = {}
"""Methods that `tersekv.register_codec` added in this process."""


@functools.lru_cache(maxsize=1)
def methods() -> dict[str, Method]:
    """Return the methods of this folder and the registered ones by name, sorted."""
    found = {name: module.METHOD for name, module in modules(__name__, __path__).items()}
    return dict(sorted((found | registered).items()))


def method_of(name: str, codec: type[Codec]) -> Method:
    """The method that uses a codec class for keys and values."""
    if not (isinstance(codec, type) and issubclass(codec, Codec) and "__dataclass_fields__" in vars(codec)):
        raise UserError(
            f"{codec!r} is not a codec; register_codec takes a class that derives from tersekv.codecs.Codec, "
            "under @dataclass(frozen=True)"
        )
    try:
        codec()
    except TypeError as error:
        raise UserError(f"{codec.__name__} cannot be built without options: {error}; give each a default") from error
    return Method(name, "", for_both_sides(codec))
