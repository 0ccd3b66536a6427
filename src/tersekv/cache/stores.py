"""The store of a layer's keys and values, by its token policy."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from tersekv.cache.layer import LayerStore
from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.policies.subgen import SubGen
from tersekv.recipe import LayerPlan
from tersekv.transforms.rope import Rope


def new_store(
    plan: LayerPlan,
    keys: Tensor,
    values: Tensor,
    window: int | None = None,
    rope: Rope | None = None,
    heads: HeadShard | None = None,
    context_parallel: ContextParallel | None = None,
    query_rope: Rope | None = None,
) -> LayerStore:
    """Build the store of a layer. In sliding-window layers every policy keeps all tokens of the
    window.

    rope, heads: see `LayerStore`. Samples are drawn, and their codecs fitted, for this process's
        heads.
    context_parallel: processes that share the packed tokens of a full-attention layer without
        eviction.
    """
    if heads is not None:
        codecs = {side: getattr(plan, side).of_heads(heads.first, heads.count) for side in ("keys", "values")}
        plan = plan._replace(**codecs)
    if isinstance(plan.policy, SubGen) and plan.policy.samples and window is None:
        # heads may fill blocks at different times, so processes could not synchronise
        other = replace(plan.policy, seed=(plan.policy.seed + (heads.first if heads else 0)) % 2**31)
        plan, heads = plan._replace(policy=other), None
    processes = context_parallel if window is None else None
    return LayerStore(plan, keys, values, window, rope, heads, processes, query_rope)
