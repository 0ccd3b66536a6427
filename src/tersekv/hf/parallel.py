"""Which of a layer's key-value heads this process holds, where transformers has divided them (`tp_plan="auto"`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from tersekv.errors import UserError
from tersekv.store.heads import Heads


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


def _place(model: PreTrainedModel | None) -> tuple[Any, int, int]:
    """Group of the processes that divide the heads, this one's place in it, and how many they are."""
    mesh: Any = getattr(model, "_device_mesh", None)
    if mesh is not None:
        mesh = mesh["tp"] if mesh.ndim > 1 else mesh
        return mesh.get_group(), mesh.get_local_rank(), mesh.size()
    if dist.is_available() and dist.is_initialized():
        return None, dist.get_rank(), dist.get_world_size()
    return None, 0, 1
