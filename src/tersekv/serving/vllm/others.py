"""Every other attention backend of vLLM by its name: the same class as without the plug-in, unless a recipe is set.

vLLM resolves a backend's class only when a layer chooses it, as `tersekv.serving.vllm.others.<NAME>`. A recipe that
such a layer could not honour must not be forgotten silently.
"""

from __future__ import annotations

from typing import Any

from tersekv.errors import UserError


def __getattr__(name: str) -> Any:
    """vLLM's own class of the backend `name`.

    Raises:
        UserError: a recipe is set.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from tersekv.serving.vllm.options import configured

    recipe = configured(get_current_vllm_config_or_none())
    if recipe is not None:
        raise UserError(
            f"recipe '{recipe}' cannot be served: {_reason(name)}; leave the recipe out for vLLM's own cache"
        )
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)


def _reason(name: str) -> str:
    from vllm.platforms import current_platform

    from tersekv.serving.vllm import OWN, why_not_version

    if reason := why_not_version():
        return reason
    own = OWN.get(current_platform.device_name)
    if own is None:
        return f"vLLM runs on {current_platform.device_name}, and the plug-in has kernels for CPUs and CUDA only"
    if "MLA" in name:
        return "the model has latent attention (MLA), whose cache is no keys and values"
    return (
        f"vLLM has chosen its backend {name}, and the plug-in stands for {own} only (--attention-backend {own}, where "
        "the model does not ask for another)"
    )
