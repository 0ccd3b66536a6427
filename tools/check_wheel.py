"""Load an installed tersekv's extension without torch, and print its instruction sets.

A wheel's test runs it where torch need not be installed. It fails if the extension is missing, does not load, or holds
other instruction sets than its platform should have.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import types
from pathlib import Path


class AnyNames(types.ModuleType):
    """A module that has every name, in the place of torch."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def main() -> None:
    """Load the extension and check its instruction sets."""
    import tersekv

    folder = Path(tersekv.__file__).parent / "kernels" / "cpu"
    (file,) = folder.glob("_native*.so")
    registry, kernels = types.ModuleType("tersekv.kernels.registry"), types.ModuleType("tersekv.kernels")
    registry.NotTaken = type("NotTaken", (Exception,), {})
    kernels.__path__ = []
    places = {"torch": AnyNames("torch"), "tersekv.kernels": kernels, "tersekv.kernels.registry": registry}
    sys.modules.update(places)
    spec = importlib.util.spec_from_file_location("_native", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [name for name, _ in module.isas()]
    x86 = platform.machine() in ("x86_64", "AMD64")
    expected = {"scalar"}
    if x86:
        expected |= {"avx512vnni", "avx512bf16", "avx512", "avx2"} | ({"amx"} if sys.platform == "linux" else set())
    print(f"tersekv {tersekv.__version__}, Python {platform.python_version()}, {file.name}: {', '.join(found)}")
    if set(found) != expected:
        sys.exit(f"expected {', '.join(sorted(expected))}")


if __name__ == "__main__":
    main()
