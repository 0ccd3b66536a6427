"""Create quantised caches of transformers, for benchmarks."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, QuantizedCache

from tersekv.errors import UserError

PEERS: dict[str, tuple[str, dict[str, int]]] = {
    "quanto-4": ("quanto", {"nbits": 4}),
    "quanto-2": ("quanto", {"nbits": 2}),
    "hqq-4": ("hqq", {"nbits": 4}),
    "hqq-2": ("hqq", {"nbits": 2}),
    "fp8": ("fp8", {}),
}
"""Backend and options by name; all other options have the backend's defaults."""

PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


def new_peer(model: PreTrainedModel, name: str) -> Any:
    """Return an empty cache of the kind `name` in `PEERS`.

    Raises:
        UserError: the library of its backend is not installed.
    """
    backend, options = PEERS[name]
    try:
        return QuantizedCache(backend, model.config, **options)
    except ImportError as error:
        package = PACKAGES.get(backend, backend)
        raise UserError(f"{name} needs the package {package}: pip install {package}") from error
