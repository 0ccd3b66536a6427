"""Wrappers of all other attention backends of vLLM, by name. They refuse recipes and otherwise
change nothing.

vLLM resolves a backend's class only when a layer chooses it, as
`tersekv.serving.vllm.others.<NAME>`. Without these classes a recipe would be ignored silently for
such a layer. vLLM reuses the class for later engines of the process, which may have a recipe. The
class therefore checks again for each layer.
"""

from __future__ import annotations

import functools
from typing import Any

from tersekv.errors import UserError


def __getattr__(name: str) -> Any:
    """Return vLLM's own backend `name`, wrapped to refuse recipes.

    Raises:
        UserError: a recipe is set.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    _refuse_recipe(name)
    return _without_recipe(name)


@functools.cache
def _without_recipe(name: str) -> Any:
    """Return a subclass of vLLM's backend that checks for a recipe before it returns its
    implementation."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    native = resolve_obj_by_qualname(AttentionBackendEnum[name].value)

    def get_impl_cls() -> Any:
        """Return vLLM's implementation if no recipe is set."""
        _refuse_recipe(name)
        return native.get_impl_cls()

    own = {"__module__": native.__module__, "__qualname__": native.__qualname__, "__doc__": native.__doc__}
    return type(native.__name__, (native,), own | {"get_impl_cls": staticmethod(get_impl_cls)})


def _refuse_recipe(name: str) -> None:
    """Raise UserError if the engine being created has a recipe."""
    from vllm.config import get_current_vllm_config_or_none

    from tersekv.serving.vllm.options import configured

    choice = configured(get_current_vllm_config_or_none())
    if choice is not None:
        raise UserError(
            f"recipe '{choice.recipe}' cannot be served: {_reason(name)}; leave the recipe out for vLLM's own cache"
        )


def _reason(name: str) -> str:
    from vllm.platforms import current_platform

    from tersekv.serving.vllm import OWN, why_not_version

    if reason := why_not_version():
        return reason
    own = OWN.get(current_platform.device_name)
    if own is None:
        return f"vLLM runs on {current_platform.device_name}, and the plug-in has kernels for CPUs and CUDA only"
    if "MLA" in name:
        return "the model has latent attention (MLA), whose cache does not hold keys and values"
    return (
        f"vLLM has chosen its backend {name}, and the plug-in replaces {own} only (--attention-backend {own}, where "
        "the model does not ask for another)"
    )
