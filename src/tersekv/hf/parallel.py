"""What this process holds of a layer where several share it: key-value heads that transformers has divided
(`tp_plan="auto"`), tokens that the user wants divided (`context_parallel`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.errors import UserError
from tersekv.recipe import LayerPlan
from tersekv.store.heads import Heads
from tersekv.store.spread import Spread
from tersekv.transforms.rope import Rope


def heads_of(model: PreTrainedModel | None, held: int, total: int) -> Heads | None:
    """The share of a process whose layers hold `held` of `total` heads; None where that is all of them.

    Raises:
        UserError: the heads are divided, and nothing says among whom.
    """
    if held >= total:
        return None
    group, rank, ranks = _place(model)
    if ranks * held != total:
        raise UserError(
            f"this process holds {held} of {total} key-value heads and knows of {ranks} processes: divide the heads "
            'evenly with from_pretrained(..., tp_plan="auto") under torchrun, and use the cache under tersekv.compress'
        )

    def gather(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    return Heads(rank * held, held, total, gather)


def spread_over(group: dist.ProcessGroup | None) -> Spread | None:
    """The processes of a group, as those that divide a context; None where there is none.

    Raises:
        UserError: this process is not in the group.
    """
    if group is None:
        return None
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise UserError("context_parallel: this process is not in the group; give one that it belongs to")

    def gather(x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return parts

    return Spread(rank, ranks, gather)


def check_spread(recipe: object, plan: LayerPlan, passes_handles: bool, rope: Rope | None) -> None:
    """Raise UserError unless the packed tokens of a layer can be divided among processes."""
    why = None
    if plan.policy.drops:
        why = "its policy drops tokens; use one that keeps all (window)"
    elif not passes_handles:
        why = "the model opens keys and values before attention"
    elif rope is not None and rope.varies:
        why = "keys before RoPE need frequencies that do not change with the length; use pre_rope=false"
    if why is not None:
        raise UserError(f"context_parallel does not serve {recipe} here: {why}")


def _place(model: PreTrainedModel | None) -> tuple[Any, int, int]:
    """Group of the processes that divide the heads, this one's place in it, and how many they are."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is not None:
        mesh = mesh["tp"] if mesh.ndim > 1 else mesh
        return mesh.get_group(), mesh.get_local_rank(), mesh.size()
    if dist.is_available() and dist.is_initialized():
        return None, dist.get_rank(), dist.get_world_size()
    return None, 0, 1
