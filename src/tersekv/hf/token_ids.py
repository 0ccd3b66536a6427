"""Ids of the tokens in a cache, for `CompressedCache.keep_common` and a warning about another prompt.

Forward passes under `tersekv.compress` show them. Tokens that are given as embeddings, that compiled
passes read, or that were read without `compress` are unknown, and so are all tokens after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PADDING = -1
"""Stands for a padding token, because equal ids in place of padding and of text are not the same token."""

FEATURES = "inputs_embeds", "pixel_values", "input_features"
"""Beginnings of the names of inputs whose content the ids do not tell."""

MANY = 64
"""Number of runs from which they are joined, because a tensor per token takes memory."""


class TokenIds:
    """Ids int32 [B, n] of the first n tokens of a cache, as far as they are known."""

    def __init__(self) -> None:
        self._runs: list[Tensor] = []

    @property
    def known(self) -> int:
        """Number of tokens whose ids are known."""
        return sum([run.shape[1] for run in self._runs])

    def note(self, start: int, ids: Tensor | None) -> None:
        """Add the ids of a pass over the tokens from `start` on; None where they are unknown."""
        known = self.known
        if known > start:
            self.crop(start)
        if ids is None or known < start:
            return
        if self._runs and len(ids) != len(self._runs[0]):
            return  # the layers refuse another batch
        if self._runs and self._runs[0].device != ids.device:
            self._runs = [run.to(ids.device) for run in self._runs]
        self._runs.append(ids)
        if len(self._runs) > MANY:
            self.joined()

    def joined(self) -> Tensor | None:
        """Return the known ids, or None if there are none."""
        if len(self._runs) > 1:
            self._runs = [torch.cat(self._runs, dim=1)]
        return self._runs[0] if self._runs else None

    def padding(self) -> list[int]:
        """Return the number of padding tokens that each row begins with."""
        held = self.joined()
        return [] if held is None else (held == PADDING).sum(dim=1).tolist()

    def crop(self, tokens: int) -> None:
        """Keep the ids of the first `tokens` tokens."""
        if self.known > tokens:
            held = self.joined()
            self._runs = [held[:, :tokens]] if held is not None and tokens else []

    def select(self, rows: Tensor) -> None:
        """Keep the given rows. rows: row numbers or a bool mask."""
        held = self.joined()
        self._runs = [] if held is None else [held[rows.to(held.device)]]

    def repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._runs = [run.repeat_interleave(repeats, dim=0) for run in self._runs]

    def common(self, ids: Tensor) -> int:
        """Return the number of known tokens that `ids` [B, T] begins with, in all rows."""
        held = self.joined()
        if held is None or len(held) != len(ids):
            return 0
        n = min(held.shape[1], ids.shape[1])
        equal = (held[:, :n] == ids[:, :n].to(held.device)).all(dim=0)
        return int(equal.long().cumprod(0).sum())


def without_padding(ids: Tensor, mask: Any = None) -> Tensor:
    """Return ids [B, T] as int32 with `PADDING` before the first 1 of a mask [B, ≥ T], whose end belongs
    to the ids."""
    ids = ids.detach().reshape(-1, ids.shape[-1]).to(torch.int32, copy=True)
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= ids.shape[1]:
        hidden = (mask != 0).cumsum(dim=1)[:, mask.shape[1] - ids.shape[1] :] == 0
        hidden = hidden if hidden.device == ids.device else hidden.to(ids.device)  # the host waits for a move to it
        return ids.masked_fill_(hidden, PADDING)
    return ids


def ids_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the ids of a call of a model, or None if they do not tell what the model reads."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    others = [name for name, value in kwargs.items() if value is not None and name.startswith(FEATURES)]
    if others or not isinstance(ids, Tensor) or ids.dim() != 2:
        return None
    # the mask is the second positional argument
    return without_padding(ids, kwargs.get("attention_mask", args[1] if len(args) > 1 else None))
