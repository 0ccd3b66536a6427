"""Shares of a layer under tensor parallelism (heads, by `tp_plan="auto"` of transformers) and
context parallelism (tokens, by `context_parallel`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.cache.parallel import ContextParallel, HeadShard
from tersekv.errors import UserError


def heads_of(model: PreTrainedModel | None, held: int, total: int) -> HeadShard | None:
    """Return the share of this process, whose layers hold `held` of `total` heads; None without
    tensor parallelism.

    Raises:
        UserError: the heads are not split evenly among the processes.
    """
    mesh: Any = getattr(model, "_device_mesh", None)
    if held >= total or mesh is None:
        return None
    mesh = mesh["tp"] if mesh.ndim > 1 else mesh
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    if ranks * held != total:
        raise UserError(
            f"this process holds {held} of {total} key-value heads, and the model is split among {ranks} processes: "
            "choose a number of processes that divides the heads"
        )

    def gather(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    return HeadShard(rank * held, held, total, gather)


def spread_over(group: dist.ProcessGroup | None) -> ContextParallel | None:
    """Return the context parallelism over a process group; None without a group.

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

    return ContextParallel(rank, ranks, gather)
